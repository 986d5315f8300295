"""Collectives of the abstract run: who has issued what, in which order, and whether the members agree."""

from __future__ import annotations

from dataclasses import dataclass

from syncline.program.actions import Action, GatherParameters, ReduceGradients, ReduceReplicated
from syncline.program.program import Program
from syncline.program.verification.state import Blocked, Collective, Content, RankState, Violation


@dataclass
class _Joined:
    """One collective of a group as far as it has got: what its first member issued, and how many have come."""

    first: Collective
    arrived: int = 0


class CollectiveSequences:
    """Every collective of every group, by its place in the group's sequence."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._joined: dict[tuple[tuple[int, ...], str, int], _Joined] = {}

    def issue(self, rank: RankState, action: Action, snapshot: dict[int, Content]) -> Collective:
        """`rank` starts the next collective of the action's group, into which it puts `snapshot`."""
        group = self._program.members(rank.number, action.group)  # type: ignore[attr-defined]
        channel = "parameters" if isinstance(action, GatherParameters) else ""
        index = rank.issued.get((group, channel), 0)
        rank.issued[group, channel] = index + 1
        collective = Collective(group, index, action, snapshot, channel)
        meeting = self._joined.setdefault((group, channel, index), _Joined(collective))
        meeting.arrived += 1
        if _signature(meeting.first.action) != _signature(action):
            what = f"another member of {group} issues {meeting.first.action} there"
            raise Violation(4, rank.number, action, what)
        return collective

    def wait_for(self, collective: Collective) -> None:
        """Raises `Blocked` while a member has not come."""
        if self._of(collective).arrived < len(collective.group):
            raise Blocked

    def require_alike(self, rank: RankState, collective: Collective) -> None:
        """Members must put in the same micro-batches, reduced alike, at the same scale."""
        first = self._of(collective).first
        if first.snapshot == collective.snapshot:
            return
        mine, theirs = ({m: (c.axes, c.owned_only) for m, c in s.snapshot.items()} for s in (collective, first))
        if mine != theirs:
            raise Violation(2, rank.number, collective.action, "members put in different micro-batches")
        raise Violation(5, rank.number, collective.action, "members put in gradients of different scales")

    def _of(self, collective: Collective) -> _Joined:
        return self._joined[collective.group, collective.channel, collective.index]


def _signature(action: Action) -> tuple[object, ...]:
    """What members of a group must agree on; copies of a tied parameter lie in buckets of different numbers."""
    if isinstance(action, ReduceGradients):
        return (type(action), action.bucket, action.op, action.kind)
    if isinstance(action, GatherParameters):
        return (type(action), action.bucket, action.kind)
    if isinstance(action, ReduceReplicated):
        return (type(action), action.what)
    return (type(action), getattr(action, "scale", None))
