"""The naive step: what every option starts from, written to be obviously right.

Every rank runs its schedule; every backward is followed by the reduction of each of its stage's buckets, waited for at
once and divided by the number of replicas, so that what has accumulated is always the mean over replicas; then each
bucket is updated and zeroed. Losses are sums over tokens and are not scaled: the normalisation is a pass of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from syncline.placement import Placement
from syncline.program.actions import (
    ADDING_GRADIENTS,
    Action,
    BackwardWeight,
    ClipGradients,
    CountTokens,
    Forward,
    OptimizerStep,
    ReceiveActivation,
    ReceiveGradient,
    ReduceGradients,
    ReduceLoss,
    ScaleGradients,
    SendActivation,
    SendGradient,
    WaitReduce,
    ZeroGradients,
)
from syncline.program.factors import ONE, Factor
from syncline.program.layout import Bucket, ParameterLayout
from syncline.program.messages import messages_in_flight
from syncline.program.program import Program, Sizes
from syncline.program.schedules import Schedule
from syncline.program.schedules.alternating import forwards
from syncline.topology import REPLICA_AXES, Topology


def naive_program(
    topology: Topology,
    placement: Placement,
    layout: ParameterLayout,
    micro_batches: int,
    schedule: Schedule,
    sizes: Sizes,
) -> Program:
    """The step with no option at all."""
    ranks = []
    for rank in range(topology.world_size):
        stages = placement.stages_at(topology.position(rank))
        buckets = [bucket for stage in stages for bucket in layout.of_stage(stage)]
        actions: list[Action] = [CountTokens(replica_group(topology))]
        for action in _pipeline(topology, placement, rank, micro_batches, schedule):
            actions.append(action)
            if isinstance(action, ADDING_GRADIENTS):
                actions += _mean_over_replicas(topology, layout.of_stage(action.stage))
        actions.append(ClipGradients(tuple(bucket.id for bucket in buckets if bucket.counts_in_norm), "pp"))
        for bucket in buckets:
            actions += [OptimizerStep(bucket.id), ZeroGradients(bucket.id)]
        actions.append(ReduceLoss("world", ONE))
        ranks.append(tuple(actions))
    return _program(topology, placement, layout, micro_batches, sizes, ranks)


def forward_program(
    topology: Topology, placement: Placement, layout: ParameterLayout, micro_batches: int, sizes: Sizes
) -> Program:
    """Evaluation: every micro-batch runs forward through all stages; the summed loss and the token count come back."""
    ranks = []
    for rank in range(topology.world_size):
        only_forwards = _pipeline(topology, placement, rank, micro_batches, forwards)
        ranks.append((CountTokens(replica_group(topology)), *only_forwards, ReduceLoss("world", ONE)))
    return _program(topology, placement, layout, micro_batches, sizes, ranks)


def replica_group(topology: Topology) -> str:
    """The name of the group that averages a gradient: the replica axes in use, `dp` when there is one replica."""
    return "+".join(axis for axis in REPLICA_AXES if topology.degrees[axis] > 1) or "dp"


def _program(
    topology: Topology,
    placement: Placement,
    layout: ParameterLayout,
    micro_batches: int,
    sizes: Sizes,
    ranks: Sequence[Sequence[Action]],
) -> Program:
    # All pipelines are alike.
    in_flight = messages_in_flight({rank: ranks[rank] for rank in topology.group(0, ("pp",))})
    return Program(topology, placement, layout, micro_batches, ONE, sizes, tuple(map(tuple, ranks)), in_flight)


def _pipeline(
    topology: Topology, placement: Placement, rank: int, micro_batches: int, schedule: Schedule
) -> Iterator[Action]:
    def holder(stage: int) -> int | None:
        """The rank to which a message goes; None where there is none, or it is this rank itself."""
        there = 0 <= stage <= placement.last_stage
        found = topology.neighbour(rank, pp=placement.position(stage)) if there else rank
        return None if found == rank else found

    for action in schedule(placement, topology.position(rank), micro_batches):
        stage, index = action.stage, action.micro_batch
        before, after = holder(stage - 1), holder(stage + 1)
        if isinstance(action, Forward):
            if before is not None:
                yield ReceiveActivation(stage, index, before)
            yield action
            if after is not None:
                yield SendActivation(stage, index, after)
        elif isinstance(action, BackwardWeight):
            yield action
        else:
            if after is not None:
                yield ReceiveGradient(stage, index, after)
            yield action
            if before is not None:
                yield SendGradient(stage, index, before)


def _mean_over_replicas(topology: Topology, buckets: Sequence[Bucket]) -> Iterator[Action]:
    if topology.replicas == 1:
        return
    for bucket in buckets:
        yield ReduceGradients(bucket.id, replica_group(topology))
        yield WaitReduce(bucket.id)
        yield ScaleGradients(bucket.id, Factor.of(replicas=-1))
