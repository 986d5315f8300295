"""What the verifier's abstract run keeps of ranks, buckets and collectives; the rules, and how breaking one is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction

from syncline.program.actions import Action, Computation, Part, PointToPoint, ReduceGradients

RULES = {
    1: "every receive has its send, in an order that cannot deadlock",
    2: "every gradient of every micro-batch is inside exactly one reduction per group that needs it",
    3: "no read before its wait, no write between start and wait, no use after free, nothing leaked",
    4: "collectives are issued in the same order by every member of their group",
    5: "the product of all scales on a gradient's path is exactly the target",
    6: "storage of gradients and of gathered parameters by liveness peaks at what the program declares",
}


class Violation(Exception):
    """A rule that a program breaks: names the rank, the action and the rule."""

    def __init__(self, rule: int, rank: int, action: Action | None, what: str) -> None:
        self.rule, self.rank, self.action = rule, rank, action
        where = f"rank {rank}" + (f", {action}" if action is not None else ", end of the step")
        super().__init__(f"rule {rule} ({RULES[rule]}) is broken at {where}: {what}")


@dataclass(frozen=True)
class Content:
    """What a gradient storage holds of one micro-batch: its coefficient, and over which axes it is reduced."""

    coefficient: Fraction
    axes: frozenset[str] = frozenset()
    owned_only: bool = False
    """Only in the part that the rank owns; the rest is worthless."""


@dataclass
class StorageState:
    """The abstract storage of a bucket's gradients, or of a shard."""

    live: bool
    contents: dict[int, Content] = field(default_factory=dict)


@dataclass
class BucketState:
    """One bucket on one rank."""

    parts: dict[Part, StorageState]
    in_flight: ReduceGradients | None = None
    """The reduction that has been started and not waited for."""
    copies_summed: bool = False
    consumed: bool = False

    @property
    def whole(self) -> StorageState:
        return self.parts[Part.BUCKET]

    @property
    def read(self) -> StorageState:
        """The storage from which the optimizer reads."""
        return self.parts.get(Part.SHARD, self.whole)


class Parameters(Enum):
    """What a rank has of a bucket's parameters."""

    CURRENT = "up to date"
    OUTDATED = "behind what their owners have"
    GATHERING = "on their way"
    FREED = "freed but for the owned part"


@dataclass
class RankState:
    """One rank's state."""

    number: int
    position: int = 0
    buckets: dict[int, BucketState] = field(default_factory=dict)
    seeds: dict[int, Fraction] = field(default_factory=dict)
    forwards: set[tuple[int, int]] = field(default_factory=set)
    backwards: set[tuple[int, int]] = field(default_factory=set)
    activations: set[tuple[int, int]] = field(default_factory=set)
    offloaded: set[tuple[int, int]] = field(default_factory=set)
    gradients: dict[tuple[int, int], Fraction] = field(default_factory=dict)
    receiving: dict[tuple[int, str], list[PointToPoint]] = field(default_factory=dict)
    """By peer and direction the receives that have been started, and not waited for."""
    awaited_halves: dict[tuple[int, int], Fraction] = field(default_factory=dict)
    """By stage and micro-batch the seed of a backward whose second half is still to come."""
    inside: list[Computation] = field(default_factory=list)
    awaited_writes: dict[int, tuple[Computation, Fraction]] = field(default_factory=dict)
    """The gradients of the running backward for buckets that it has yet to allocate."""
    clipped: bool = False
    looked_for_overflow: bool = False
    parameters: dict[int, Parameters] = field(default_factory=dict)
    held_bytes: int = 0
    peak_bytes: int = 0
    gathered_bytes: int = 0
    peak_gathered_bytes: int = 0
