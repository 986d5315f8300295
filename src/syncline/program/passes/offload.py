"""`offload_activations`: what forwards save for their backwards waits in host memory."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.program.actions import Action, Forward, OffloadActivations
from syncline.program.program import Program


def offload_activations(program: Program) -> Program:
    """An `OffloadActivations` inside every forward, before whatever else is inside it."""

    def change(rank: int, actions: Sequence[Action]) -> list[Action]:
        changed: list[Action] = []
        for action in actions:
            changed.append(action)
            if isinstance(action, Forward):
                changed.append(OffloadActivations(action.stage, action.micro_batch, action))
        return changed

    return program.map_ranks(change)
