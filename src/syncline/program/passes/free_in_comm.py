"""`free_grads_in_comm`, and stages 2 and 3: a bucket lives until it is reduced; only shards outlive its reduction."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.program.actions import (
    ADDING_GRADIENTS,
    Action,
    Computation,
    FreeGradients,
    Part,
    ZeroGradients,
    happening_during,
)
from syncline.program.passes.positions import clipping
from syncline.program.passes.sync_moment import SYNCHRONISATION
from syncline.program.program import Program


def free_in_communication(program: Program) -> Program:
    """What would be cleared for the next micro-batch is freed instead."""

    def change(rank: int, actions: Sequence[Action]) -> list[Action]:
        clip = clipping(actions)
        return [
            FreeGradients(action.bucket)
            if isinstance(action, ZeroGradients) and action.part is Part.BUCKET and index < clip
            else action
            for index, action in enumerate(actions)
        ]

    return program.map_ranks(change)


def reduce_inside(program: Program) -> Program:
    """What stands behind a backward, from the reduction to the freeing of each bucket, happens inside it.

    So a bucket's storage is given back before the next bucket needs some. `overlap_reductions` then lets the next
    bucket fill meanwhile.
    """

    def change(rank: int, actions: Sequence[Action]) -> list[Action]:
        changed: list[Action] = []
        backward: Computation | None = None
        for action in actions:
            if isinstance(action, ADDING_GRADIENTS):
                backward = action
            elif not isinstance(action, (*SYNCHRONISATION, FreeGradients)):
                backward = None
            elif backward is not None:
                action = happening_during(backward, action)
            changed.append(action)
        return changed

    return program.map_ranks(change)
