"""Schedules that alternate: forwards until a rank holds as many activations as it may, then a backward for each.

Micro-batches go through a rank's stages in groups: the group's forwards through the first stage, then through the
second, and so on; its backwards the other way round. Between a micro-batch's forwards through two stages of one rank it
visits all other ranks, and the rest of the group fills that time if it has as many micro-batches as there are ranks. So
k micro-batches form floor(k / positions) groups of sizes as equal as possible: none is too small, whatever k.

With p positions, v stages at each, forward and backward times F and B of a whole rank's layers, a rank idles for

    (p - 1 + (v - 1) * max(0, p - k)) / v * (F + B)

of a step that computes for k * (F + B). It holds the activations of at most `live_limit` micro-batches, each at one of
its stages.

A backward can be halved: I, the gradient of the stage's input, for which the rank before waits, and W, those of its
weights, for which nobody does. Then W fills the time in which a rank would wait. Every position may hold as much as the
first one holds anyway, and puts off so many W. With v = 1, k >= p and W <= I a rank idles for (p - 1) * (F + I - W);
with more stages at a position for the v-th part of that, or somewhat more.

Sources: for v = 1, PipeDream-Flush, Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (2021), section
2.2. For v > 1, the interleaved schedule of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM" (2021), section 2.2, which has groups of p and asks for a k that p divides. For all forwards
first, GPipe, Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (2019),
section 2.3. For halved backwards, ZB-H1, Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise

from syncline.schedules.computations import Backward, BackwardInput, BackwardWeight, Computation, Forward
from syncline.schedules.placement import Placement


def one_forward_one_backward(placement: Placement, position: int, micro_batches: int) -> Iterator[Computation]:
    """As few activations as keep every rank busy."""
    yield from _alternate(placement, position, micro_batches, live_limit(placement, position, micro_batches))


def forward_then_backward(placement: Placement, position: int, micro_batches: int) -> Iterator[Computation]:
    """All forwards, then all backwards: the activations of every micro-batch are held at once."""
    # Nobody waits for the forwards of a lone rank: holding all activations would buy nothing.
    limit = placement.per_position * (micro_batches if placement.positions > 1 else 1)
    yield from _alternate(placement, position, micro_batches, limit)


def zero_bubble(placement: Placement, position: int, micro_batches: int) -> Iterator[Computation]:
    """As `one_forward_one_backward`, with halved backwards."""
    limit, most = (live_limit(placement, each, micro_batches) for each in (position, 0))
    order = _alternate(placement, position, micro_batches, limit)
    forwards_left = placement.per_position * micro_batches
    deferred: deque[BackwardWeight] = deque()
    for action in order:
        if isinstance(action, Forward):
            forwards_left -= 1
            yield action
            continue
        yield BackwardInput(action.stage, action.micro_batch)
        deferred.append(BackwardWeight(action.stage, action.micro_batch))
        if len(deferred) > most - limit or not forwards_left:
            yield deferred.popleft()
    yield from deferred


def forwards(placement: Placement, position: int, micro_batches: int) -> Iterator[Forward]:
    """Forwards alone, as for an evaluation."""
    for group in groups(placement, micro_batches):
        for stage in placement.stages_at(position):
            yield from (Forward(stage, index) for index in group)


def live_limit(placement: Placement, position: int, micro_batches: int) -> int:
    """How many activations a rank at `position` holds at most under `one_forward_one_backward`: forwards of a
    micro-batch through one stage whose backward is still to come.

    The last position needs those of the whole group at all its stages but the last, and one there; each position before
    it one more for the way to its successor, and with several stages one more for the way back.
    """
    behind = placement.positions - 1 - position
    if placement.per_position == 1:
        return behind + 1
    largest = max(map(len, groups(placement, micro_batches)))
    return 2 * behind + (placement.per_position - 1) * max(largest, placement.positions) + 1


def groups(placement: Placement, micro_batches: int) -> list[range]:
    """The micro-batches that go through a rank's stages together."""
    count = max(1, micro_batches // placement.positions)
    starts = [-(-micro_batches * index // count) for index in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _alternate(placement: Placement, position: int, micro_batches: int, limit: int) -> Iterator[Forward | Backward]:
    """Forwards while fewer than `limit` wait for their backward, otherwise the next backward."""
    stages = placement.stages_at(position)
    waiting = 0
    coming = forwards(placement, position, micro_batches)
    next_forward = next(coming, None)
    for group in groups(placement, micro_batches):
        for stage in reversed(stages):
            for index in group:
                while next_forward is not None and waiting < limit:
                    yield next_forward
                    next_forward = next(coming, None)
                    waiting += 1
                yield Backward(stage, index)
                waiting -= 1
