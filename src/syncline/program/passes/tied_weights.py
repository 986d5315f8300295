"""Parameters that several stages hold (tied embedding and head): their gradients are summed before they are read."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.program.actions import Action, ClipGradients, ReduceReplicated
from syncline.program.layout import Bucket
from syncline.program.program import Program


def sum_tied_gradients(program: Program) -> Program:
    def change(rank: int, actions: Sequence[Action]) -> list[Action]:
        sums = [
            ReduceReplicated(bucket.id, "tied:" + ",".join(map(str, bucket.tie_stages)), bucket.tie)
            for bucket in program.buckets(rank)
            if bucket.tie is not None and program.owns(rank, bucket.id) and _is_first_copy(program, rank, bucket)
        ]
        changed: list[Action] = []
        for action in actions:
            if isinstance(action, ClipGradients):
                changed += sums
            changed.append(action)
        return changed

    return program.map_ranks(change)


def _is_first_copy(program: Program, rank: int, bucket: Bucket) -> bool:
    """Whether `rank` has no copy of what is in the bucket on an earlier stage."""
    return bucket.stage == min(stage for stage in program.stages(rank) if stage in bucket.tie_stages)
