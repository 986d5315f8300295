"""Numbers that every rank must have: the tokens of the global batch, and the reported loss."""

from __future__ import annotations

from syncline.program.actions import Action, CountTokens, ReduceLoss
from syncline.program.verification.handlers import Handler, World
from syncline.program.verification.state import RankState, Violation
from syncline.strategy.topology import REPLICA_AXES


class TotalRules:
    """What is summed must be summed over all ranks that have a part of it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._program = world.program

    @property
    def handlers(self) -> dict[type[Action], Handler]:
        return {CountTokens: self._count_tokens, ReduceLoss: self._reduce_loss}

    def _count_tokens(self, rank: RankState, action: Action) -> None:
        assert isinstance(action, CountTokens)
        replicas = self._program.topology.group(rank.number, REPLICA_AXES)
        if self._program.members(rank.number, action.group) != replicas:
            raise Violation(5, rank.number, action, f"the tokens of the replicas {replicas} must be counted")
        self._world.blocking_collective(rank, action)

    def _reduce_loss(self, rank: RankState, action: Action) -> None:
        assert isinstance(action, ReduceLoss)
        if len(self._program.members(rank.number, action.group)) != self._program.topology.world_size:
            raise Violation(5, rank.number, action, "the losses of all ranks must be summed")
        if action.scale != self._program.target:
            raise Violation(5, rank.number, action, f"the loss must be scaled by {self._program.target}")
        self._world.blocking_collective(rank, action)
