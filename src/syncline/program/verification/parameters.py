"""The life of divided parameters: who has the current ones when they are used."""

from __future__ import annotations

from syncline.program.actions import (
    Action,
    Computation,
    FreeParameters,
    GatherParameters,
    OptimizerStep,
    WaitGather,
)
from syncline.program.interpreter import Collective
from syncline.program.verification.state import Parameters, RankState, Violation
from syncline.program.verification.world import Rules, Snapshot, World
from syncline.strategy import DIVIDING_AXES, Ownership

GATHERING = {Ownership.SLICES: "all_gather", Ownership.TENSORS: "broadcast"}


class ParameterRules:
    """Follows every bucket's parameters from their update to their next use."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._program = world.program
        self._divided = world.program.layout.ownership is not Ownership.REPLICATED
        self._states_between_steps: dict[int, dict[int, Parameters]] = {}

    @property
    def rules(self) -> Rules:
        return Rules(
            perform={FreeParameters: self._free},
            join={GatherParameters: self._gather},
            complete={WaitGather: self._gathered},
        )

    def start(self, rank: RankState) -> None:
        """What a rank has when a step begins: what it has when the step ends."""
        rank.parameters = dict(self._between_steps(rank.number))

    def require_at_end(self, rank: RankState) -> None:
        for id, expected in self._between_steps(rank.number).items():
            state = rank.parameters[id]
            if state is not expected:
                what = f"the parameters of bucket {id} are {state.value}, and not {expected.value} as they were"
                raise Violation(3, rank.number, None, what)
        declared = self._program.peak_gathered_bytes
        if declared and declared[rank.number] != rank.peak_gathered_bytes:
            what = f"{rank.peak_gathered_bytes} bytes of gathered parameters, {declared[rank.number]} were declared"
            raise Violation(6, rank.number, None, what)

    def use(self, rank: RankState, computation: Computation) -> None:
        """A computation uses every bucket of its stage: now, or once the bucket has been waited for during it."""
        inside = self._program.inside(rank.number, rank.position)
        awaited = {action.bucket for action in inside if isinstance(action, WaitGather)}
        for bucket in self._program.layout.all_of_stage(computation.stage):
            state = self._state(rank, computation, bucket.id)
            if state is not Parameters.CURRENT and bucket.id not in awaited:
                raise Violation(3, rank.number, computation, f"the parameters of bucket {bucket.id} are {state.value}")

    def outdate(self, rank: RankState, action: OptimizerStep) -> None:
        """An update: where ownership is divided, somebody else has updated the rest."""
        state = rank.parameters[action.bucket]
        if state is Parameters.GATHERING:
            raise Violation(3, rank.number, action, "its parameters are being gathered")
        if self._divided and state is not Parameters.FREED:
            rank.parameters[action.bucket] = Parameters.OUTDATED

    def outdate_the_rest(self, rank: RankState) -> None:
        """From the norm on, owners update buckets of which this rank owns nothing."""
        for bucket in self._program.buckets(rank.number):
            current = rank.parameters[bucket.id] is Parameters.CURRENT
            if current and not self._program.owns(rank.number, bucket.id):
                rank.parameters[bucket.id] = Parameters.OUTDATED

    def _between_steps(self, rank: int) -> dict[int, Parameters]:
        """What a rank has of every bucket between two steps, by what it does first with it, and whether it frees it."""
        if rank not in self._states_between_steps:
            states: dict[int, Parameters] = {}
            for action in self._program.ranks[rank]:
                if isinstance(action, FreeParameters):
                    states[action.bucket] = Parameters.FREED
                elif isinstance(action, WaitGather):
                    states.setdefault(action.bucket, Parameters.GATHERING)
                elif isinstance(action, GatherParameters):
                    states.setdefault(action.bucket, Parameters.CURRENT)
            self._states_between_steps[rank] = {
                bucket.id: states.get(bucket.id, Parameters.CURRENT) for bucket in self._program.parameter_buckets(rank)
            }
        return self._states_between_steps[rank]

    def _gather(self, rank: RankState, action: GatherParameters) -> Snapshot:
        group = self._program.topology.group(rank.number, DIVIDING_AXES)
        ownership = self._program.layout.ownership
        if action.kind != GATHERING.get(ownership) or self._program.members(rank.number, action.group) != group:
            raise Violation(3, rank.number, action, f"parameters are owned by {ownership.value} among ranks {group}")
        state = self._state(rank, action, action.bucket)
        frees = self._between_steps(rank.number)[action.bucket] is Parameters.FREED
        if state is not (Parameters.FREED if frees else Parameters.OUTDATED):
            raise Violation(3, rank.number, action, f"there is nothing to gather: the parameters are {state.value}")
        rank.parameters[action.bucket] = Parameters.GATHERING
        if frees:
            rank.gathered_bytes += self._program.parameter_bytes(action.bucket)
            rank.peak_gathered_bytes = max(rank.peak_gathered_bytes, rank.gathered_bytes)
        return {}

    def _gathered(self, rank: RankState, action: WaitGather, gather: Collective | None) -> None:
        """Without a `gather` of this program the step before has started it."""
        if self._state(rank, action, action.bucket) is not Parameters.GATHERING:
            raise Violation(3, rank.number, action, "no gather of this bucket has been started")
        rank.parameters[action.bucket] = Parameters.CURRENT

    def _free(self, rank: RankState, action: FreeParameters) -> None:
        state = self._state(rank, action, action.bucket)
        if state is not Parameters.CURRENT:
            raise Violation(3, rank.number, action, f"its parameters are {state.value}")
        rank.parameters[action.bucket] = Parameters.FREED
        rank.gathered_bytes -= self._program.parameter_bytes(action.bucket)

    def _state(self, rank: RankState, action: Action, id: int) -> Parameters:
        if id not in rank.parameters:
            raise Violation(3, rank.number, action, f"the rank does not hold bucket {id}")
        return rank.parameters[id]
