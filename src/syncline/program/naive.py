"""The naive step: what every option starts from, written to be obviously right.

Every rank runs its schedule; every backward is followed by the reduction of each of its stage's buckets, waited for at
once and divided by the number of replicas, so that what has accumulated is always the mean over replicas; then each
bucket is updated and zeroed. Losses are sums over tokens and are not scaled: the normalisation is a pass of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from syncline.program.actions import (
    ADDING_GRADIENTS,
    Action,
    ClipGradients,
    Computation,
    CountTokens,
    OptimizerStep,
    ReduceGradients,
    ReduceLoss,
    ScaleGradients,
    WaitReduce,
    ZeroGradients,
)
from syncline.program.analysis.capacity import messages_in_flight
from syncline.program.layout import Bucket, ParameterLayout
from syncline.program.messages import with_messages
from syncline.program.program import Program, Sizes
from syncline.program.scales import ONE, Factor
from syncline.schedules import Schedule
from syncline.schedules.alternating import forwards
from syncline.schedules.placement import Placement
from syncline.strategy.topology import REPLICA_AXES, Topology


def naive_program(
    topology: Topology,
    placement: Placement,
    layout: ParameterLayout,
    micro_batches: int,
    schedule: Schedule,
    sizes: Sizes,
) -> Program:
    """The step with no option at all."""
    orders = _orders(placement, micro_batches, schedule)
    ranks = []
    for rank in range(topology.world_size):
        stages = placement.stages_at(topology.position(rank))
        buckets = [bucket for stage in stages for bucket in layout.of_stage(stage)]
        actions: list[Action] = [CountTokens(replica_group(topology))]
        for action in with_messages(topology, placement, rank, orders):
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
    orders = _orders(placement, micro_batches, forwards)
    ranks = []
    for rank in range(topology.world_size):
        only_forwards = with_messages(topology, placement, rank, orders)
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


def _orders(placement: Placement, micro_batches: int, schedule: Schedule) -> list[list[Computation]]:
    """What is computed at each position of a pipeline."""
    return [list(schedule(placement, position, micro_batches)) for position in range(placement.positions)]


def _mean_over_replicas(topology: Topology, buckets: Sequence[Bucket]) -> Iterator[Action]:
    if topology.replicas == 1:
        return
    for bucket in buckets:
        yield ReduceGradients(bucket.id, replica_group(topology))
        yield WaitReduce(bucket.id)
        yield ScaleGradients(bucket.id, Factor.of(replicas=-1))
