"""Numbers that every rank must have: the tokens of the global batch, and the reported loss."""

from __future__ import annotations

from syncline.program.actions import CountTokens, ReduceLoss
from syncline.program.verification.state import RankState, Violation
from syncline.program.verification.world import Rules, Snapshot, World
from syncline.strategy.topology import REPLICA_AXES


class TotalRules:
    """What is summed must be summed over all ranks that have a part of it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._program = world.program

    @property
    def rules(self) -> Rules:
        return Rules(join={CountTokens: self._count_tokens, ReduceLoss: self._reduce_loss})

    def _count_tokens(self, rank: RankState, action: CountTokens) -> Snapshot:
        replicas = self._program.topology.group(rank.number, REPLICA_AXES)
        if self._program.members(rank.number, action.group) != replicas:
            raise Violation(5, rank.number, action, f"the tokens of the replicas {replicas} must be counted")
        return {}

    def _reduce_loss(self, rank: RankState, action: ReduceLoss) -> Snapshot:
        if len(self._program.members(rank.number, action.group)) != self._program.topology.world_size:
            raise Violation(5, rank.number, action, "the losses of all ranks must be summed")
        if action.scale != self._program.target:
            raise Violation(5, rank.number, action, f"the loss must be scaled by {self._program.target}")
        return {}
