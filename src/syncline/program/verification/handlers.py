"""What all rules share: the program, its collectives, and the exact values of factors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from syncline.program.actions import Action
from syncline.program.program import Program
from syncline.program.scales import Factor
from syncline.program.verification.collectives import CollectiveSequences
from syncline.program.verification.state import Content, RankState

Handler = Callable[[RankState, Action], None]
"""Performs an action on a rank. Raises `Blocked` when it cannot go on yet, `Violation` when a rule is broken."""


@dataclass(frozen=True)
class World:
    """The ground on which the abstract run happens."""

    program: Program
    collectives: CollectiveSequences
    quantities: dict[str, Fraction]
    updates: bool
    """Whether the program is a step that updates, and not forwards alone."""

    @staticmethod
    def of(program: Program, *, updates: bool) -> World:
        return World(
            program,
            CollectiveSequences(program),
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

    def blocking_collective(self, rank: RankState, action: Action, snapshot: dict[int, Content] | None = None) -> None:
        """A collective that every member waits for where it stands."""
        if rank.blocked_in is None:
            rank.blocked_in = self.collectives.issue(rank, action, dict(snapshot or {}))
        collective = rank.blocked_in
        self.collectives.wait_for(collective)
        rank.blocked_in = None
        self.collectives.require_alike(rank, collective)
