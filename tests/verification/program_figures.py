"""What a program must send and hold, by formula: none of it is computed as `program.analysis.costs` computes it."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import ceil

from syncline.program.actions import (
    AccumulateShard,
    Action,
    AllocateGradients,
    Backward,
    BackwardInput,
    Forward,
    FreeGradients,
    FreeParameters,
    GatherParameters,
    Part,
    WaitGather,
)
from syncline.program.layout import Bucket
from syncline.program.program import Program
from syncline.strategy import Ownership, Strategy, SyncMoment

SCALAR = 8
"""Bytes of a count, a norm or a loss."""


def ring(members: int, payload: int, rounds: int) -> int:
    """`rounds` times around a ring, rounded up: an all-reduce goes around twice, its halves once each."""
    return ceil(Fraction(rounds * (members - 1) * payload, members))


def reductions_per_bucket(strategy: Strategy) -> int:
    return strategy.micro_batches if strategy.sync is SyncMoment.EVERY_MICRO_BATCH else 1


def expected_bytes(program: Program, strategy: Strategy, rank: int) -> int:
    """Messages between stages, scalars, tied copies, and what becomes of each bucket."""
    topology = program.topology
    stages = {stage: holder(program, rank, stage) for stage in range(program.placement.stages)}
    neighbours = sum(
        stages.get(stage + step, rank) != rank for stage in stages if stages[stage] == rank for step in (-1, 1)
    )
    sent = neighbours * program.micro_batches * program.sizes.activation_bytes
    sharded = strategy.ownership is not Ownership.REPLICATED
    sent += ring(topology.replicas, SCALAR, 2)  # The token count, ...
    sent += ring(topology.pp * (topology.sharding if sharded else 1), SCALAR, 2)  # ... the norm, ...
    sent += ring(topology.world_size, SCALAR, 2)  # ... and the loss.
    return sent + sum(_bucket_bytes(program, strategy, rank, bucket) for bucket in program.parameter_buckets(rank))


def holder(program: Program, rank: int, stage: int) -> int:
    """Who has a stage of the pipeline in which `rank` is: stages go round the ranks, or to and fro."""
    topology, placement = program.topology, program.placement
    way, along = divmod(stage, topology.pp)
    back = placement.folded and way % 2 == 1
    return topology.rank(**{**topology.coordinate(rank), "pp": topology.pp - 1 - along if back else along})


def _bucket_bytes(program: Program, strategy: Strategy, rank: int, bucket: Bucket) -> int:
    topology, sizes, n = program.topology, program.sizes, program.topology.sharding
    reductions = 0 if bucket.frozen else reductions_per_bucket(strategy)
    gradient, parameter = bucket.numel * sizes.reduce_itemsize, bucket.numel * sizes.parameter_itemsize
    copies = bucket.numel * sizes.gradient_itemsize if len(bucket.tie_stages) > 1 else 0
    stages = max(1, len({holder(program, rank, stage) for stage in bucket.tie_stages}))
    if strategy.ownership is Ownership.REPLICATED:
        return reductions * ring(topology.replicas, gradient, 2) + ring(stages, copies, 2)
    if strategy.ownership is Ownership.SLICES:
        # Without dp: two halves of an all-reduce, of gradients and of parameters; or a reduce-scatter and the gathers.
        gathers = _gathers(program, rank, bucket) if strategy.divides_parameters else 1
        sent = reductions * ring(n, gradient, 1) + gathers * ring(n, parameter, 1)
        return sent + reductions * ring(topology.dp, gradient // n, 2) + ring(stages, copies // n, 2)
    if topology.coordinate(rank)["sharding"] != bucket.owner:
        return reductions * gradient
    return (n - 1) * parameter + reductions * ring(topology.dp, gradient, 2) + ring(stages, copies, 2)


def _gathers(program: Program, rank: int, bucket: Bucket) -> int:
    return sum(isinstance(a, GatherParameters) and a.bucket == bucket.id for a in program.ranks[rank])


def expected_held_bytes(program: Program, strategy: Strategy, rank: int) -> int:
    """Gradient bytes between two steps."""
    if strategy.release_gradients:
        return 0
    buckets = program.buckets(rank)
    whole = sum(bucket.numel for bucket in buckets)
    owned = sum(_owned(program, rank, bucket) for bucket in buckets)
    if strategy.frees_reduced_gradients:
        return owned * program.sizes.gradient_itemsize
    adds_up_in_shards = strategy.shards > 1 and reductions_per_bucket(strategy) > 1
    return (whole + (owned if adds_up_in_shards else 0)) * program.sizes.gradient_itemsize


def most_gradient_bytes(program: Program, strategy: Strategy, rank: int) -> int:
    """What gradients may never exceed."""
    sizes = sorted((bucket.numel for bucket in program.buckets(rank)), reverse=True)
    owned = sum(_owned(program, rank, bucket) for bucket in program.buckets(rank))
    if strategy.shards == 1:
        elements = sum(sizes)
    elif strategy.frees_reduced_gradients and reductions_per_bucket(strategy) == program.micro_batches:
        elements = _most_at_once(program, strategy, rank) + owned
    elif strategy.frees_reduced_gradients or reductions_per_bucket(strategy) > 1:
        elements = sum(sizes) + owned
    else:
        elements = sum(sizes)
    return elements * program.sizes.gradient_itemsize


def _most_at_once(program: Program, strategy: Strategy, rank: int) -> int:
    """Elements of the buckets that are partly filled when one of them is full, and with overlap of another, which is
    still being reduced.
    """
    buckets = program.buckets(rank)
    if strategy.sync is SyncMoment.AFTER_ACCUMULATION:
        return sum(bucket.numel for bucket in buckets)
    specs = {(spec.stage, spec.name): spec for spec in program.layout.specs}
    filling = {}
    for bucket in buckets:
        members = [specs[bucket.stage, slot.name] for slot in bucket.slots]
        last_uses = [(spec.last_use, spec.order) for spec in members]
        filling[bucket] = max(last_uses), min((spec.first_use, spec.order) for spec in members)
    most = 0
    for _, full in filling.values():
        open_then = [bucket for bucket, (opens, fills) in filling.items() if opens >= full >= fills]
        others = [bucket.numel for bucket in buckets if bucket not in open_then] if strategy.overlap else []
        most = max(most, sum(bucket.numel for bucket in open_then) + max(others, default=0))
    return most


def _owned(program: Program, rank: int, bucket: Bucket) -> int:
    topology, ownership = program.topology, program.layout.ownership
    if ownership is Ownership.SLICES:
        return bucket.numel // topology.sharding
    owns = ownership is Ownership.REPLICATED or topology.coordinate(rank)["sharding"] == bucket.owner
    return bucket.numel if owns else 0


def walk_gradients(program: Program, rank: int) -> tuple[int, int]:
    """(bytes before the step, the most at any moment): a storage lives before the step unless it is allocated first."""
    size = {(bucket.id, Part.BUCKET): bucket.numel for bucket in program.buckets(rank)}
    size |= {(bucket.id, Part.SHARD): _owned(program, rank, bucket) for bucket in program.buckets(rank)}
    changes = [action for action in program.ranks[rank] if isinstance(action, (AllocateGradients, FreeGradients))]
    first = {(action.bucket, action.part): action for action in reversed(changes)}
    shards = {(a.bucket, Part.SHARD) for a in program.ranks[rank] if isinstance(a, AccumulateShard)}
    used = shards | {(bucket.id, Part.BUCKET) for bucket in program.buckets(rank)}
    held = before = sum(size[each] for each in used if not isinstance(first.get(each), AllocateGradients))
    most = held
    for action in changes:
        held += (1 if isinstance(action, AllocateGradients) else -1) * size[action.bucket, action.part]
        most = max(most, held)
    assert held == before, "the step ends with other storage than it began with"
    return before * program.sizes.gradient_itemsize, most * program.sizes.gradient_itemsize


def check_gathered(program: Program, rank: int) -> int:
    """The most bytes of gathered parameters at any moment of a stage 3 step.

    They are the buckets in use where the computation stands, by the places of their first and last use, and one that
    is on its way.
    """
    buckets = {bucket.id: bucket for bucket in program.parameter_buckets(rank)}
    gathered: set[int] = set()
    place: int | None = None
    most = 0
    for action in program.ranks[rank]:
        place = _place(action, place, buckets)
        if isinstance(action, GatherParameters):
            in_use = {id for id in gathered if place is not None and _uses(buckets[id], place)}
            assert gathered <= in_use, f"rank {rank}: {gathered - in_use} are still there at {action}"
            gathered.add(action.bucket)
            most = max(most, sum(buckets[id].numel for id in gathered) * program.sizes.parameter_itemsize)
        elif isinstance(action, FreeParameters):
            gathered.remove(action.bucket)
    assert not gathered
    return most


def _place(action: Action, place: int | None, buckets: Mapping[int, Bucket]) -> int | None:
    """Where the computation stands behind the action: where it begins, then where it uses what it has waited for."""
    during = getattr(action, "during", None)
    if isinstance(action, Forward):
        return min(bucket.first_use for bucket in buckets.values() if bucket.stage == action.stage)
    if isinstance(action, (Backward, BackwardInput)):
        return max(bucket.last_use for bucket in buckets.values() if bucket.stage == action.stage)
    if isinstance(action, WaitGather):
        bucket = buckets[action.bucket]
        return bucket.first_use if isinstance(during, Forward) else bucket.last_use
    return place if during is not None else None


def _uses(bucket: Bucket, place: int) -> bool:
    return bucket.first_use <= place <= bucket.last_use
