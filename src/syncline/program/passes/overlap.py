"""Overlap: a reduction that follows a backward starts inside it, and is waited for as late as anyone can bear."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeGuard

from syncline.program.actions import (
    ADDING_GRADIENTS,
    Action,
    AllocateGradients,
    ClipGradients,
    Computation,
    FreeGradients,
    OptimizerStep,
    Part,
    ReduceGradients,
    ReduceReplicated,
    WaitReduce,
    bucket_of,
    happening_during,
)
from syncline.program.layout import Bucket
from syncline.program.passes.allocation import is_due
from syncline.program.passes.sync_moment import SYNCHRONISATION
from syncline.program.program import Program

FOLLOWERS = (*SYNCHRONISATION, AllocateGradients, FreeGradients)
"""What may stand between a backward and the end of its reductions."""


def overlap_reductions(program: Program) -> Program:
    """Reductions that follow a backward are started by its gradients.

    What must happen inside the backward as well (a further reduction of the same bucket, the freeing of its storage)
    happens when the next bucket is full: one bucket is on its way while the next one fills.
    """
    return program.map_ranks(lambda rank, actions: _sink_waits(program, list(_start_inside(program, actions))))


def _start_inside(program: Program, actions: Sequence[Action]) -> Iterator[Action]:
    followers: list[Action] = []
    backward: Computation | None = None
    for action in actions:
        if backward is not None and isinstance(action, FOLLOWERS):
            followers.append(action)
            continue
        if backward is not None:
            yield from _interleave(program, followers, backward)
        followers, backward = [], action if isinstance(action, ADDING_GRADIENTS) else None
        yield action
    if backward is not None:
        yield from _interleave(program, followers, backward)


def _interleave(program: Program, followers: Sequence[Action], backward: Computation) -> Iterator[Action]:
    """allocate 0, reduce 0, allocate 1, the rest of 0 that belongs inside, reduce 1, ...; then what may wait."""
    awaited = [action for action in followers if _allocates_bucket(action)]
    rest = [action for action in followers if not _allocates_bucket(action)]
    inside: list[Action] = []
    pending: list[Action] = []
    outside: list[Action] = []
    for bucket in dict.fromkeys(map(bucket_of, rest)):
        due = [action for action in awaited if is_due(program, action, bucket)]
        awaited = [action for action in awaited if action not in due]
        inside += due
        chain = [action for action in rest if bucket_of(action) == bucket]
        belongs_inside = [i for i, a in enumerate(chain) if isinstance(a, (ReduceGradients, FreeGradients))]
        if belongs_inside:
            inside += [*pending, chain[0]]
            pending = chain[1 : belongs_inside[-1] + 1]
            chain = chain[belongs_inside[-1] + 1 :]
        outside += chain
    for action in (*inside, *awaited, *pending):
        yield happening_during(backward, action)
    yield from outside


def _allocates_bucket(action: Action) -> TypeGuard[AllocateGradients]:
    return isinstance(action, AllocateGradients) and action.part is Part.BUCKET


def _sink_waits(program: Program, actions: Sequence[Action]) -> list[Action]:
    """Every wait outside a backward, with what follows from it, moves down to just before the first action that touches
    its bucket.
    """
    changed: list[Action] = []
    pending: dict[int, list[Action]] = {}
    for action in actions:
        bucket = bucket_of(action)
        if isinstance(action, WaitReduce) and action.during is None:
            pending[action.bucket] = [action]
            continue
        if bucket in pending and isinstance(action, SYNCHRONISATION) and not isinstance(action, ReduceGradients):
            pending[bucket].append(action)
            continue
        for waited in [waited for waited in pending if _touches(action, program.bucket(waited))]:
            changed += pending.pop(waited)
        changed.append(action)
    assert not pending, f"waits for buckets {list(pending)} are never needed"
    return changed


def _touches(action: Action, bucket: Bucket) -> bool:
    if isinstance(action, ADDING_GRADIENTS):
        return action.stage == bucket.stage
    if isinstance(action, ClipGradients):
        return True
    if isinstance(action, ReduceReplicated):
        return action.what == bucket.tie
    return isinstance(action, (OptimizerStep, ReduceGradients)) and action.bucket == bucket.id
