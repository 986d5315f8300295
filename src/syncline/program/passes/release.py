"""`enable_release_grads`: storage exists from its first gradient until its last reader is done, not between steps."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.program.actions import Action, FreeGradients, Part, ZeroGradients
from syncline.program.program import Program


def release_gradients(program: Program) -> Program:
    """What would be cleared for the last time in a step is freed instead."""

    def change(rank: int, actions: Sequence[Action]) -> list[Action]:
        changed: list[Action] = []
        released: set[tuple[int, Part]] = set()
        for action in reversed(actions):
            if isinstance(action, ZeroGradients) and (action.bucket, action.part) not in released:
                released.add((action.bucket, action.part))
                action = FreeGradients(action.bucket, action.during, action.part)
            changed.append(action)
        return changed[::-1]

    return program.map_ranks(change)
