"""Where things stand in a rank's list."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.program.actions import ADDING_GRADIENTS, Action, ClipGradients, bucket_of
from syncline.program.program import Program


def final(program: Program, actions: Sequence[Action]) -> list[bool]:
    """For each action whether it is about a bucket and stands behind the last backward of the bucket's stage: nothing
    is added to the bucket any more.
    """
    last = {action.stage: index for index, action in enumerate(actions) if isinstance(action, ADDING_GRADIENTS)}
    buckets = [bucket_of(action) for action in actions]
    return [bucket is not None and index > last[program.bucket(bucket).stage] for index, bucket in enumerate(buckets)]


def clipping(actions: Sequence[Action]) -> int:
    """The position of the clipping: in front of it every gradient is reduced, behind it none is written."""
    return next(index for index, action in enumerate(actions) if isinstance(action, ClipGradients))
