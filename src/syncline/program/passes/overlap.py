"""Overlap: a reduction that follows a backward starts inside it, and is waited for as late as anyone can bear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from syncline.program.actions import (
    Action,
    Backward,
    ClipGradients,
    OptimizerStep,
    ReduceGradients,
    ReduceReplicated,
    ScaleGradients,
    WaitReduce,
)
from syncline.program.program import Program


def overlap_reductions(program: Program) -> Program:
    """Reductions that stand right behind a backward (waits and scales aside) are started by its gradients."""
    return program.map_ranks(lambda rank, actions: _sink_waits(_start_inside(actions)))


def _start_inside(actions: Sequence[Action]) -> list[Action]:
    """Each backward's reductions move right behind it, marked as started during it; waits and scales follow."""
    changed: list[Action] = []
    backward: Backward | None = None
    insert_at = 0
    for action in actions:
        if isinstance(action, Backward):
            backward, insert_at = action, len(changed) + 1
        elif isinstance(action, ReduceGradients) and backward is not None:
            changed.insert(insert_at, replace(action, during=backward))
            insert_at += 1
            continue
        elif not isinstance(action, (WaitReduce, ScaleGradients)):
            backward = None
        changed.append(action)
    return changed


def _sink_waits(actions: Sequence[Action]) -> list[Action]:
    """Every wait, with the scales that depend on it, moves down to just before the first action that touches its
    bucket.
    """
    changed: list[Action] = []
    pending: dict[int, list[Action]] = {}
    for action in actions:
        if isinstance(action, WaitReduce):
            pending[action.bucket] = [action]
            continue
        if isinstance(action, ScaleGradients) and action.bucket in pending:
            pending[action.bucket].append(action)
            continue
        for bucket in [bucket for bucket in pending if _touches(action, bucket)]:
            changed += pending.pop(bucket)
        changed.append(action)
    assert not pending, f"waits for buckets {list(pending)} are never needed"
    return changed


def _touches(action: Action, bucket: int) -> bool:
    if isinstance(action, (Backward, ClipGradients)):
        return True
    return isinstance(action, (OptimizerStep, ReduceReplicated, ReduceGradients)) and action.bucket == bucket
