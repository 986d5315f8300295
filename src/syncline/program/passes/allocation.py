"""Storage that is freed within a step is allocated where it is next written to, and no sooner."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.program.actions import (
    ADDING_GRADIENTS,
    AccumulateShard,
    Action,
    AllocateGradients,
    Backward,
    BackwardWeight,
    Computation,
    FreeGradients,
    Part,
    bucket_of,
)
from syncline.program.layout import Bucket
from syncline.program.program import Program


def allocate_where_written(program: Program) -> Program:
    def change(rank: int, actions: Sequence[Action]) -> list[Action]:
        absent = {(action.bucket, action.part) for action in actions if isinstance(action, FreeGradients)}
        changed: list[Action] = []
        awaited: list[AllocateGradients] = []
        for action in actions:
            inside = getattr(action, "during", None) is not None
            due = [a for a in awaited if not inside or is_due(program, a, bucket_of(action))]
            awaited = [a for a in awaited if a not in due]
            changed += due
            if isinstance(action, AccumulateShard) and (action.bucket, Part.SHARD) in absent:
                absent.remove((action.bucket, Part.SHARD))
                changed.append(AllocateGradients(action.bucket, action.during, Part.SHARD))
            changed.append(action)
            if isinstance(action, FreeGradients):
                absent.add((action.bucket, action.part))
            if isinstance(action, ADDING_GRADIENTS):
                awaited = [
                    AllocateGradients(bucket.id, action)
                    for bucket in _in_order_of_first_gradients(program, action)
                    if (bucket.id, Part.BUCKET) in absent
                ]
                absent -= {(allocation.bucket, Part.BUCKET) for allocation in awaited}
        return changed

    return program.map_ranks(change)


def is_due(program: Program, awaited: AllocateGradients, bucket: int | None) -> bool:
    """Whether the awaited bucket is expected to get its first gradient before `bucket` is full."""
    if bucket is None:
        return False
    first = _first_gradient(program.bucket(awaited.bucket), awaited.during)
    return awaited.bucket == bucket or first > program.bucket(bucket).last_gradient


def _in_order_of_first_gradients(program: Program, backward: Backward | BackwardWeight) -> list[Bucket]:
    buckets = program.layout.of_stage(backward.stage)
    return sorted(buckets, key=lambda bucket: _first_gradient(bucket, backward), reverse=True)


def _first_gradient(bucket: Bucket, backward: Computation | None) -> tuple[int, int]:
    """When the bucket gets its first gradient, in the order of use: a backward goes through it the other way, and the
    second half of one adds what was put off bucket by bucket.
    """
    return bucket.last_gradient if isinstance(backward, BackwardWeight) else bucket.first_gradient
