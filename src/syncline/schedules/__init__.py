"""In which order one rank computes its forwards and backwards. A schedule knows nothing but where stages are and the
number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from syncline.schedules.alternating import forward_then_backward, one_forward_one_backward, zero_bubble
from syncline.schedules.bounded import bounded
from syncline.schedules.computations import Computation
from syncline.schedules.placement import Placement
from syncline.schedules.v_shaped import dual_pipe_v, zero_bubble_v

Schedule = Callable[[Placement, int, int], Iterable[Computation]]
"""(placement, position, micro_batches) -> the computations of the rank at that position, in order."""

SCHEDULES: dict[str, Schedule] = {
    "1F1B": one_forward_one_backward,
    "VPP": one_forward_one_backward,
    "FThenB": forward_then_backward,
    "ZBH1": zero_bubble,
    "ZBV": zero_bubble_v,
    "DualPipeV": dual_pipe_v,
}
"""1F1B with several stages at a position is VPP, the interleaved schedule, under either name."""

BOUNDED = ("Bounded", "BoundedV")
"""Schedules that hold as many activations as they are told."""


def schedule_named(name: str, most_activations: int) -> Schedule:
    """The schedule of that name; `most_activations`, each of a micro-batch at one stage, binds those of `BOUNDED`."""
    return partial(bounded, limit=most_activations) if name in BOUNDED else SCHEDULES[name]


HALVED = ("ZBH1", "ZBV", "DualPipeV", "Bounded", "BoundedV")
"""Schedules that halve backwards."""

V_SHAPED = ("ZBV", "DualPipeV", "BoundedV")
"""Schedules in which the model runs down the ranks of a pipeline and up again."""

BEST = "best"
"""Stands for the schedule that a simulation finds to be the shortest (`program.analysis.best_schedule`)."""
