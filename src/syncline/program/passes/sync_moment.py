"""When gradients are reduced. The naive step reduces after every micro-batch; these passes leave one reduction per
bucket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from syncline.program.actions import (
    AccumulateShard,
    Action,
    ReduceGradients,
    ScaleGradients,
    WaitReduce,
    ZeroGradients,
    bucket_of,
)
from syncline.program.passes.positions import clipping, final
from syncline.program.program import Program

SYNCHRONISATION = (ReduceGradients, WaitReduce, ScaleGradients, AccumulateShard, ZeroGradients)
"""Between a backward and the next action of another kind: a reduction, and what becomes of its result."""


def sync_last_micro_batch(program: Program) -> Program:
    """Only the reductions that follow each stage's last backward stay: before it, gradients accumulate unreduced."""

    def change(rank: int, actions: Sequence[Action]) -> list[Action]:
        return [
            action
            for action, is_final in zip(actions, final(program, actions), strict=True)
            if is_final or not isinstance(action, SYNCHRONISATION)
        ]

    return program.map_ranks(change)


def sync_after_accumulation(program: Program) -> Program:
    """`gradient_sync_after_accumulate`: the reductions leave the backwards for the head of the optimizer phase.

    There all of them start, then each is waited for, so that they still overlap with one another.
    """

    def change(rank: int, actions: Sequence[Action]) -> list[Action]:
        clip = clipping(actions)
        before = [action for action in actions[:clip] if not isinstance(action, SYNCHRONISATION)]
        moved = [
            action
            for action, is_final in zip(actions[:clip], final(program, actions)[:clip], strict=True)
            if is_final and isinstance(action, SYNCHRONISATION)
        ]
        return [*before, *_side_by_side(moved), *actions[clip:]]

    return program.map_ranks(change)


def _side_by_side(actions: Iterable[Action]) -> Iterator[Action]:
    """All buckets' first reductions, then for each bucket what follows up to its next wait, and so on."""
    rounds: dict[int, list[Action]] = {}
    waits: Counter[int | None] = Counter()
    for action in actions:
        waits[bucket_of(action)] += isinstance(action, WaitReduce)
        rounds.setdefault(waits[bucket_of(action)], []).append(action)
    for index in sorted(rounds):
        yield from rounds[index]
