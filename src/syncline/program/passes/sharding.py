"""`sharding`: the ranks of a sharding group divide the update, each its own part, and gather what the others updated.

Reductions run inside the sharding group first, to the owners (of slices by `reduce_scatter`, of whole buckets by
`reduce`), then among the owners of the same part across the rest of the replicas. What an owner gets is added to its
shard, so that the rest of the bucket can be cleared for the next micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from syncline.program.actions import (
    AccumulateShard,
    Action,
    ClipGradients,
    GatherParameters,
    OptimizerStep,
    Part,
    ReduceGradients,
    ScaleGradients,
    WaitGather,
    WaitReduce,
    ZeroGradients,
)
from syncline.program.layout import Bucket
from syncline.program.passes.average import MEAN
from syncline.program.program import Program
from syncline.strategy import Ownership

GROUP = "sharding"

REDUCTION = {Ownership.SLICES: "reduce_scatter", Ownership.TENSORS: "reduce"}
GATHERING = {Ownership.SLICES: "all_gather", Ownership.TENSORS: "broadcast"}


def shard_updates(program: Program) -> Program:
    """Each rank reduces to the owners, updates what it owns, and gathers the rest at once."""
    kind, gathering = REDUCTION[program.layout.ownership], GATHERING[program.layout.ownership]

    def reduction(rank: int, bucket: int) -> Iterator[Action]:
        yield ReduceGradients(bucket, GROUP, kind=kind)
        yield WaitReduce(bucket)
        if program.owns(rank, bucket):
            if program.topology.dp > 1:
                yield ReduceGradients(bucket, "dp")
                yield WaitReduce(bucket)
            yield AccumulateShard(bucket)
        yield ZeroGradients(bucket)

    def change(rank: int, actions: Sequence[Action]) -> list[Action]:
        owned = [bucket for bucket in program.buckets(rank) if program.owns(rank, bucket.id)]
        changed: list[Action] = []
        for action in actions:
            if isinstance(action, ReduceGradients):
                changed += reduction(rank, action.bucket)
            elif isinstance(action, ClipGradients):
                changed += [ScaleGradients(bucket.id, MEAN) for bucket in owned]
                counted = tuple(bucket.id for bucket in owned if bucket.counts_in_norm)
                parts = f"{action.group}+{GROUP}" if program.topology.pp > 1 else GROUP
                changed.append(ClipGradients(counted, parts, action.scale))
                changed += _updates(program.buckets(rank), owned, gathering)
            elif not isinstance(action, (WaitReduce, ScaleGradients, OptimizerStep, ZeroGradients)):
                changed.append(action)
        return changed

    return program.map_ranks(change)


def _updates(buckets: Sequence[Bucket], owned: Sequence[Bucket], gathering: str) -> Iterator[Action]:
    """The buckets that the next forward uses first come first."""
    in_use_order = sorted(buckets, key=lambda bucket: (bucket.stage, bucket.first_use, -bucket.id))
    for bucket in in_use_order:
        if bucket in owned:
            yield OptimizerStep(bucket.id)
            yield ZeroGradients(bucket.id, part=Part.SHARD)
        yield GatherParameters(bucket.id, GROUP, gathering)
    for bucket in in_use_order:
        yield WaitGather(bucket.id)


def step_in_place(program: Program) -> Program:
    """Where a bucket is reduced once in a step, its owner reads the gradient where the reduction has left it.

    Nothing is copied to a shard, and the bucket is cleared once the gradient has been used.
    """

    def change(rank: int, actions: Sequence[Action]) -> list[Action]:
        changed: list[Action] = []
        for action in actions:
            if isinstance(action, AccumulateShard):
                continue
            if isinstance(action, ZeroGradients):
                if action.part is Part.BUCKET:
                    if program.owns(rank, action.bucket):
                        continue
                else:
                    action = ZeroGradients(action.bucket)
            changed.append(action)
        return changed

    return program.map_ranks(change)
