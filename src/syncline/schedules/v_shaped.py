"""Schedules in which every rank holds two stages, and the model runs down the ranks and up again.

The first rank has the first and the last stage. So a micro-batch's backward begins where its forward began, the last
rank hands over to itself, and no rank holds more activations than another.

Both schedules are sequences of phases. A phase asks for computations; what there is nothing left of, or what cannot
come yet since the rank has not got so far itself, is left out. So any number of micro-batches will do; the formulae
hold from `2 * positions` on. With p positions, forward F, and halves I and W of a backward through both stages of a
rank, a rank waits, where F = I = W,

- under ZBV for (p - 1) / 2 * F, and holds the activations of at most 2 p micro-batches at one stage each;
- under DualPipeV for at most p / 2 * F, and holds at most 2 p + 1 of them. A forward and a backward stand beside each
  other in its middle phase, so that the messages of one travel behind the other.

Sources: ZBV, Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 6; DualPipeV, DeepSeek-AI, "DeepSeek-V3
Technical Report" (2024), section 3.2.1, cut in half as in Qi et al., "Pipeline Parallelism with Controllable Memory"
(2024).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from syncline.schedules.computations import Backward, BackwardInput, BackwardWeight, Computation, Forward
from syncline.schedules.placement import Placement

DOWN, UP = 0, 1
"""A rank's earlier stage and its later one."""


def zero_bubble_v(placement: Placement, position: int, micro_batches: int) -> Iterator[Computation]:
    """ZBV. Backwards go on to the rank before as soon as their first half is done; weight halves fill the end."""
    rank = _Rank(placement, position, micro_batches)
    after = placement.positions - position
    for _ in range(2 * after - 1):
        rank.forward(DOWN)
    for _ in range(position):
        rank.forward(UP)
        rank.forward(DOWN)
    for _ in range(after):
        rank.forward(UP)
        rank.backward_halves(UP)
    while rank.has_forwards:
        rank.forward(DOWN)
        rank.backward_halves(DOWN)
        rank.forward(UP)
        rank.backward_halves(UP)
    for _ in range(position):
        rank.backward_input(DOWN)
        rank.backward_input(UP)
    for _ in range(after):
        rank.backward_input(DOWN)
        rank.backward_weight()
    return rank.finish()


def dual_pipe_v(placement: Placement, position: int, micro_batches: int) -> Iterator[Computation]:
    """DualPipeV. In its middle phase a forward of one stage stands beside a backward of the other."""
    rank = _Rank(placement, position, micro_batches)
    behind = placement.positions - 1 - position
    for _ in range(2 * behind):
        rank.forward(DOWN)
    for _ in range(position + 1):
        rank.forward(DOWN)
        rank.forward(UP)
    for _ in range(behind):
        rank.backward_input(UP)
        rank.backward_weight()
        rank.forward(UP)
    for _ in range(micro_batches - placement.positions - behind):
        rank.forward(DOWN)
        rank.backward(UP)
        rank.forward(UP)
        rank.backward(DOWN)
    for _ in range(behind):
        rank.backward(UP)
        rank.forward(UP)
        rank.backward(DOWN)
    whole = (position + 1) // 2
    for _ in range(whole):
        rank.backward(UP)
        rank.backward(DOWN)
    for _ in range(position + 1 - whole):
        rank.backward_input(UP)
        rank.backward_input(DOWN)
    for _ in range(behind):
        rank.backward_weight()
        rank.backward_input(DOWN)
    return rank.finish()


class _Rank:
    """One rank's computations, as they are asked for."""

    def __init__(self, placement: Placement, position: int, micro_batches: int) -> None:
        self._stages = placement.stages_at(position)
        assert len(self._stages) == 2, "one stage on the way down, one on the way up"
        self._micro_batches = micro_batches
        self._forwards = [0, 0]
        self._backwards = [0, 0]
        self._deferred: deque[BackwardWeight] = deque()
        self._order: list[Computation] = []

    @property
    def has_forwards(self) -> bool:
        return self._forwards[UP] < self._micro_batches

    def forward(self, way: int) -> None:
        limit = self._micro_batches if way == DOWN else self._forwards[DOWN]
        if self._forwards[way] < limit:
            self._order.append(Forward(self._stages[way], self._forwards[way]))
            self._forwards[way] += 1

    def backward(self, way: int) -> None:
        if (index := self._next_backward(way)) is not None:
            self._order.append(Backward(self._stages[way], index))

    def backward_halves(self, way: int) -> None:
        """One after the other, so that the rank before does not wait for both."""
        if (index := self._next_backward(way)) is not None:
            self._order += [BackwardInput(self._stages[way], index), BackwardWeight(self._stages[way], index)]

    def backward_input(self, way: int) -> None:
        if (index := self._next_backward(way)) is not None:
            self._order.append(BackwardInput(self._stages[way], index))
            self._deferred.append(BackwardWeight(self._stages[way], index))

    def backward_weight(self) -> None:
        """The oldest that has been put off."""
        if self._deferred:
            self._order.append(self._deferred.popleft())

    def finish(self) -> Iterator[Computation]:
        """All that was asked for, and what is missing still."""
        while self._backwards[DOWN] < self._micro_batches:
            for way in (DOWN, UP):
                self.forward(way)
            for way in (UP, DOWN):
                self.backward_input(way)
        return iter((*self._order, *self._deferred))

    def _next_backward(self, way: int) -> int | None:
        index = self._backwards[way]
        if index >= (self._forwards[UP] if way == UP else self._backwards[UP]):
            return None
        self._backwards[way] += 1
        return index
