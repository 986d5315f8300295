"""`enable_release_grads`: a bucket exists from its first gradient until the optimizer has consumed it, and not between
steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from syncline.program.actions import Action, AllocateGradients, Backward, FreeGradients, ZeroGradients
from syncline.program.program import Program


def release_gradients(program: Program) -> Program:
    def change(rank: int, actions: Sequence[Action]) -> list[Action]:
        changed: list[Action] = []
        allocated = False
        for action in actions:
            if isinstance(action, ZeroGradients):
                action = FreeGradients(action.bucket)
            changed.append(action)
            if isinstance(action, Backward) and not allocated:
                changed += [AllocateGradients(bucket.id, action) for bucket in program.buckets(rank)]
                allocated = True
        return changed

    return program.map_ranks(change)
