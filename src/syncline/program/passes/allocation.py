"""Storage that is freed within a step is allocated where it is next written to, and no sooner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from syncline.program.actions import (
    AccumulateShard,
    Action,
    AllocateGradients,
    Backward,
    FreeGradients,
    Part,
    bucket_of,
)
from syncline.program.program import Program


def allocate_where_written(program: Program) -> Program:
    def change(rank: int, actions: Sequence[Action]) -> list[Action]:
        absent = {(action.bucket, action.part) for action in actions if isinstance(action, FreeGradients)}
        changed: list[Action] = []
        awaited: list[AllocateGradients] = []
        for index, action in enumerate(actions):
            if getattr(action, "during", None) is None:
                changed += awaited
                awaited = []
            for allocation in [a for a in awaited if a.bucket == bucket_of(action)]:
                awaited.remove(allocation)
                changed.append(allocation)
            if isinstance(action, AccumulateShard) and (action.bucket, Part.SHARD) in absent:
                absent.remove((action.bucket, Part.SHARD))
                changed.append(AllocateGradients(action.bucket, action.during, Part.SHARD))
            changed.append(action)
            if isinstance(action, FreeGradients):
                absent.add((action.bucket, action.part))
            if isinstance(action, Backward):
                allocations = [
                    AllocateGradients(bucket.id, action)
                    for bucket in program.buckets(rank)
                    if (bucket.id, Part.BUCKET) in absent
                ]
                absent -= {(allocation.bucket, Part.BUCKET) for allocation in allocations}
                if any(isinstance(inside, FreeGradients) for inside in _inside(actions, index)):
                    # One bucket's storage is given back before the next needs some.
                    awaited = allocations
                else:
                    changed += allocations
        return changed

    return program.map_ranks(change)


def _inside(actions: Sequence[Action], backward: int) -> Iterator[Action]:
    for action in actions[backward + 1 :]:
        if getattr(action, "during", None) is None:
            return
        yield action
