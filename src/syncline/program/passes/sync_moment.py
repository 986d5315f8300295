"""When gradients are reduced. The naive step reduces after every micro-batch; these passes leave one reduction per
bucket.
"""

from __future__ import annotations

from collections.abc import Sequence

from syncline.program.actions import Action, ClipGradients, ReduceGradients, ScaleGradients, WaitReduce
from syncline.program.passes.positions import last_backward
from syncline.program.program import Program

SYNCHRONISATION = (ReduceGradients, WaitReduce, ScaleGradients)


def sync_last_micro_batch(program: Program) -> Program:
    """Only the reductions that follow each stage's last backward stay: before it, gradients accumulate unreduced."""

    def change(rank: int, actions: Sequence[Action]) -> list[Action]:
        last = last_backward(actions)
        return [
            action for index, action in enumerate(actions) if index > last or not isinstance(action, SYNCHRONISATION)
        ]

    return program.map_ranks(change)


def sync_after_accumulation(program: Program) -> Program:
    """`gradient_sync_after_accumulate`: the reductions leave the backwards for the head of the optimizer phase.

    There all of them start, then each is waited for, so that they still overlap with one another.
    """

    def change(rank: int, actions: Sequence[Action]) -> list[Action]:
        last = last_backward(actions)
        moved = [action for action in actions[last + 1 :] if isinstance(action, SYNCHRONISATION)]
        starts = [action for action in moved if isinstance(action, ReduceGradients)]
        rest = [action for action in moved if not isinstance(action, ReduceGradients)]
        changed: list[Action] = []
        for action in actions:
            if isinstance(action, ClipGradients):
                changed += [*starts, *rest]
            if not isinstance(action, SYNCHRONISATION):
                changed.append(action)
        return changed

    return program.map_ranks(change)
