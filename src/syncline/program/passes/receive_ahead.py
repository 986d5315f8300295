"""`enable_overlap_p2p_comm`: what the next computation needs is being received while the one before it runs.

Sends never wait for their receiver anyway. The receiver holds one more message for each direction.
"""

from __future__ import annotations

from collections.abc import Sequence

from syncline.program.actions import (
    COMPUTATIONS,
    Action,
    ReceiveActivation,
    ReceiveGradient,
    StartReceivingActivation,
    StartReceivingGradient,
)
from syncline.program.program import Program


def receive_ahead(program: Program) -> Program:
    def change(rank: int, actions: Sequence[Action]) -> list[Action]:
        changed: list[Action] = []
        latest: int | None = None
        for action in actions:
            if isinstance(action, (ReceiveActivation, ReceiveGradient)) and latest is not None:
                changed.insert(latest, _start(action))
                latest += 1
            if isinstance(action, COMPUTATIONS):
                latest = len(changed)
            changed.append(action)
        return changed

    return program.map_ranks(change)


def _start(action: ReceiveActivation | ReceiveGradient) -> Action:
    start = StartReceivingActivation if isinstance(action, ReceiveActivation) else StartReceivingGradient
    return start(action.stage, action.micro_batch, action.peer)
