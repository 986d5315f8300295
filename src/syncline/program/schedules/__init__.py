"""In which order one stage computes its forwards and backwards. A schedule knows nothing but its stage and the number
of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable

from syncline.program.actions import Backward, Forward
from syncline.program.schedules.forward_then_backward import forward_then_backward
from syncline.program.schedules.one_forward_one_backward import one_forward_one_backward

Schedule = Callable[[int, int, int], list[Forward | Backward]]
"""(stage, stages, micro_batches) -> the stage's computations in order."""

SCHEDULES: dict[str, Schedule] = {"1F1B": one_forward_one_backward, "FThenB": forward_then_backward}
