"""The naive step: what every option starts from, written to be obviously right.

Every rank runs its schedule; every backward is followed by the reduction of each of its buckets, waited for at once and
divided by the number of replicas, so that what has accumulated is always the mean over replicas; then each bucket is
updated and zeroed. Losses are sums over tokens and are not scaled: the normalisation is a pass of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from syncline.program.actions import (
    Action,
    Backward,
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
from syncline.program.program import Program, Sizes
from syncline.program.schedules import Schedule
from syncline.topology import REPLICA_AXES, Topology


def naive_program(
    topology: Topology, layout: ParameterLayout, micro_batches: int, schedule: Schedule, sizes: Sizes
) -> Program:
    """The step with no option at all."""
    ranks = []
    for rank in range(topology.world_size):
        buckets = layout.of_stage(topology.stage(rank))
        actions: list[Action] = [CountTokens(replica_group(topology))]
        for action in _pipeline(topology, rank, micro_batches, schedule):
            actions.append(action)
            if isinstance(action, Backward):
                actions += _mean_over_replicas(topology, buckets)
        actions.append(ClipGradients(tuple(bucket.id for bucket in buckets if bucket.counts_in_norm), "pp"))
        for bucket in buckets:
            actions += [OptimizerStep(bucket.id), ZeroGradients(bucket.id)]
        actions.append(ReduceLoss("world", ONE))
        ranks.append(tuple(actions))
    return Program(topology, layout, micro_batches, ONE, sizes, tuple(ranks))


def forward_program(topology: Topology, layout: ParameterLayout, micro_batches: int, sizes: Sizes) -> Program:
    """Evaluation: every micro-batch runs forward through all stages; the summed loss and the token count come back."""
    ranks = []
    for rank in range(topology.world_size):
        only_forwards = _pipeline(topology, rank, micro_batches, _forwards)
        ranks.append((CountTokens(replica_group(topology)), *only_forwards, ReduceLoss("world", ONE)))
    return Program(topology, layout, micro_batches, ONE, sizes, tuple(ranks))


def replica_group(topology: Topology) -> str:
    """The name of the group that averages a gradient: the replica axes in use, `dp` when there is one replica."""
    return "+".join(axis for axis in REPLICA_AXES if topology.degrees[axis] > 1) or "dp"


def _forwards(stage: int, stages: int, micro_batches: int) -> list[Forward | Backward]:
    return [Forward(stage, index) for index in range(micro_batches)]


def _pipeline(topology: Topology, rank: int, micro_batches: int, schedule: Schedule) -> Iterator[Action]:
    stage, stages = topology.stage(rank), topology.pp
    before = topology.neighbour(rank, pp=stage - 1) if stage > 0 else None
    after = topology.neighbour(rank, pp=stage + 1) if stage < stages - 1 else None
    for action in schedule(stage, stages, micro_batches):
        index = action.micro_batch
        if isinstance(action, Forward):
            if before is not None:
                yield ReceiveActivation(stage, index, before)
            yield action
            if after is not None:
                yield SendActivation(stage, index, after)
        else:
            if after is not None:
                yield ReceiveGradient(stage, index, after)
            yield action
            if before is not None:
                yield SendGradient(stage, index, before)


def _mean_over_replicas(topology: Topology, buckets: tuple[Bucket, ...]) -> Iterator[Action]:
    if topology.replicas == 1:
        return
    for bucket in buckets:
        yield ReduceGradients(bucket.id, replica_group(topology))
        yield WaitReduce(bucket.id)
        yield ScaleGradients(bucket.id, Factor.of(replicas=-1))
