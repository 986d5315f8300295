"""A schedule for any limit of activations: halved backwards, each rank doing what it can, never holding more.

Whenever a rank is free it takes the first of these that it can: the first half of a backward, for which the rank before
waits; a forward, if that leaves its activations within the limit; the second half of a backward, for which nobody
waits, but which frees activations. Where several stages could go on, a backward furthest down the model and a forward
furthest up it comes first, so that what was begun is finished. For the order all computations count as equally long.

A forward through an earlier one of a rank's stages leaves room for one through each of the later ones. So there is
always something that can go on as long as the limit allows an activation at each stage: of the micro-batches whose
forwards are under way, take the furthest up the model. All that its rank holds is of micro-batches that are no
further, so at its stages further down, and there is room for it.

With F, I and W the times of a forward and of both halves of a backward through a rank's layers, v stages on each of p
ranks, and k micro-batches, a step takes at least k * (F + I + W) + (p - 1) / v * F: then the last rank gets its
first activation. Where F = I = W and p <= k, that is what it takes from a limit of 2 * p - 1 on with one stage a rank,
and mostly from p on with several. With less than p it takes longer, and runs: with 1, one micro-batch after the other.

Source: the idea of scheduling halved backwards greedily under a memory limit is from Qi et al., "Zero Bubble Pipeline
Parallelism" (2023), section 3.1. The order of preference and the room left for later stages are Syncline's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache

from syncline.schedules.computations import BackwardInput, BackwardWeight, Computation, Forward
from syncline.schedules.placement import Placement


def bounded(placement: Placement, position: int, micro_batches: int, limit: int) -> Iterator[Computation]:
    """The order of the rank at `position`; it holds at most `limit` activations, each of a micro-batch at a stage."""
    assert limit >= placement.per_position, "a micro-batch must be able to pass all stages of a rank"
    yield from _orders(placement, micro_batches, limit)[position]


@lru_cache(maxsize=4)
def _orders(placement: Placement, micro_batches: int, limit: int) -> tuple[tuple[Computation, ...], ...]:
    ranks = [_Rank(placement.stages_at(position), micro_batches, limit) for position in range(placement.positions)]
    while not all(rank.has_finished for rank in ranks):
        # One moment of all ranks: none sees what another one computes in it.
        computed = [rank.compute() for rank in ranks]
        assert any(computed), "every rank waits for another one"
        for computation in computed:
            if isinstance(computation, Forward):
                stage = computation.stage
                if stage == placement.last_stage:
                    ranks[placement.position(stage)].can_go_back(stage, computation.micro_batch)
                else:
                    ranks[placement.position(stage + 1)].can_go_on(stage + 1, computation.micro_batch)
            elif isinstance(computation, BackwardInput) and computation.stage > 0:
                stage = computation.stage - 1
                ranks[placement.position(stage)].can_go_back(stage, computation.micro_batch)
    return tuple(tuple(rank.order) for rank in ranks)


class _Rank:
    """What one rank has computed, and could compute next."""

    def __init__(self, stages: tuple[int, ...], micro_batches: int, limit: int) -> None:
        self.order: list[Computation] = []
        self._forwards = {stage: deque[int]() for stage in reversed(stages)}
        if 0 in self._forwards:
            self._forwards[0].extend(range(micro_batches))
        self._backwards = {stage: deque[int]() for stage in stages}
        self._deferred: deque[BackwardWeight] = deque()
        self._most_held = {stage: limit - (len(stages) - 1 - index) for index, stage in enumerate(stages)}
        """How many activations there may be after a forward through each stage."""
        self._held = 0
        self._left = 3 * len(stages) * micro_batches

    @property
    def has_finished(self) -> bool:
        return not self._left

    def can_go_on(self, stage: int, micro_batch: int) -> None:
        """The forward of `micro_batch` has come to `stage`."""
        self._forwards[stage].append(micro_batch)

    def can_go_back(self, stage: int, micro_batch: int) -> None:
        """Its backward has."""
        self._backwards[stage].append(micro_batch)

    def compute(self) -> Computation | None:
        """What comes next; None when there is nothing to do."""
        computation = self._next()
        if computation is not None:
            self.order.append(computation)
            self._left -= 1
        return computation

    def _next(self) -> Computation | None:
        for stage, waiting in self._backwards.items():
            if waiting:
                micro_batch = waiting.popleft()
                self._deferred.append(BackwardWeight(stage, micro_batch))
                return BackwardInput(stage, micro_batch)
        for stage, waiting in self._forwards.items():
            if waiting and self._held < self._most_held[stage]:
                self._held += 1
                return Forward(stage, waiting.popleft())
        if self._deferred:
            self._held -= 1
            return self._deferred.popleft()
        return None
