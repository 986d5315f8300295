"""What all rules share: the program, the exact values of factors, and on what members of a collective must agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from syncline.program.actions import Action, GatherParameters, ReduceGradients, ReduceReplicated
from syncline.program.interpreter import Collective
from syncline.program.program import Program
from syncline.program.scales import Factor
from syncline.program.verification.state import Content, RankState, Violation

Perform = Callable[[RankState, Any], None]
"""Performs an action on a rank. Raises `Violation` when a rule is broken."""
Join = Callable[[RankState, Any], "Snapshot"]
"""Takes part in a collective: what the rank puts in."""
Complete = Callable[[RankState, Any, "Collective | None"], None]
"""A collective is done; `Any` is its wait, or itself where it is waited for at once."""

Snapshot = dict[int, Content]
"""What a storage holds of each micro-batch."""


@dataclass
class Rules:
    """What each kind of action means, by type."""

    perform: dict[type[Action], Perform] = field(default_factory=dict)
    join: dict[type[Action], Join] = field(default_factory=dict)
    complete: dict[type[Action], Complete] = field(default_factory=dict)

    def add(self, other: Rules) -> None:
        self.perform |= other.perform
        self.join |= other.join
        self.complete |= other.complete


@dataclass(frozen=True)
class World:
    """The ground on which the abstract run happens."""

    program: Program
    quantities: dict[str, Fraction]
    updates: bool
    """Whether the program is a step that updates, and not forwards alone."""

    @staticmethod
    def of(program: Program, *, updates: bool) -> World:
        return World(
            program,
            {
                # Large primes for what only a run knows: a product of scales that has one factor too many cannot equal
                # the target by chance. The other two are the program's own.
                "loss_scale": Fraction(100_003),
                "tokens": Fraction(1_000_003),
                "micro_batch_tokens": Fraction(10_007),
                "accumulation": Fraction(program.micro_batches),
                "replicas": Fraction(program.topology.replicas),
            },
            updates,
        )

    def value(self, factor: Factor) -> Fraction:
        return factor.evaluate(self.quantities, Fraction(1))


def require_same_collective(rank: RankState, action: Action, collective: Collective) -> None:
    """Raises `Violation` unless earlier members have issued the same."""
    if collective.joined and _signature(collective.first) != _signature(action):
        what = f"another member of {collective.members} issues {collective.first} there"
        raise Violation(4, rank.number, action, what)


def require_same_content(rank: RankState, collective: Collective) -> None:
    """Members must put in the same micro-batches, reduced alike, at the same scale."""
    action, own = collective.joined[rank.number]
    first: Snapshot = next(iter(collective.joined.values()))[1]
    if first == own:
        return
    mine, theirs = ({m: (c.axes, c.owned_only) for m, c in snapshot.items()} for snapshot in (own, first))
    if mine != theirs:
        raise Violation(2, rank.number, action, "members put in different micro-batches")
    raise Violation(5, rank.number, action, "members put in gradients of different scales")


def _signature(action: Action) -> tuple[object, ...]:
    """What members of a group must agree on; copies of a tied parameter lie in buckets of different numbers."""
    if isinstance(action, ReduceGradients):
        return (type(action), action.bucket, action.op, action.kind)
    if isinstance(action, GatherParameters):
        return (type(action), action.bucket, action.kind)
    if isinstance(action, ReduceReplicated):
        return (type(action), action.what)
    return (type(action), getattr(action, "scale", None))
