"""`enable_stage1_allgather_overlap`, `enable_stage1_broadcast_overlap`: updated parameters travel behind the next
forward.

A bucket's gather starts once its owner has updated it, at the end of the step, and is waited for in the next step, at
the forward's first use of the bucket.
"""

from __future__ import annotations

from collections.abc import Sequence

from syncline.program.actions import Action, Forward, WaitGather, happening_during
from syncline.program.program import Program


def gather_behind_forward(program: Program) -> Program:
    def change(rank: int, actions: Sequence[Action]) -> list[Action]:
        waits = [action for action in actions if isinstance(action, WaitGather)]
        changed: list[Action] = []
        for action in actions:
            if isinstance(action, WaitGather):
                continue
            changed.append(action)
            if isinstance(action, Forward):
                of_stage = [wait for wait in waits if program.bucket(wait.bucket).stage == action.stage]
                changed += [happening_during(action, wait) for wait in of_stage]
                waits = [wait for wait in waits if wait not in of_stage]
        return changed

    return program.map_ranks(change)
