"""Learning-rate schedules: pure functions of the number of updates applied.

The formulas are those of `transformers.get_scheduler`. Where that has no lower bound (`linear`), the decay runs down to
`minimum` as its cosine does: a factor `f` from 1 to 0 gives `minimum + f * (peak - minimum)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class ScheduleKind(str, Enum):
    """How the learning rate moves after the warmup."""

    LINEAR = "linear"
    COSINE = "cosine"
    CONSTANT = "constant"
    """No warmup either: the peak from the first update on."""
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    POLYNOMIAL = "polynomial"


@dataclass(frozen=True)
class LearningRateSchedule:
    """The warmup is linear from zero; the decay reaches `minimum` at `total_steps` and stays there."""

    kind: ScheduleKind
    peak: float
    total_steps: int
    """Optimizer steps of the whole run, the warmup included."""
    warmup_steps: int = 0
    minimum: float = 0.0
    """The learning rate at the end of the decay; the two constant kinds never reach it."""
    power: float = 1.0
    """The exponent of the polynomial decay."""


def learning_rate(schedule: LearningRateSchedule, step: int) -> float:
    """The learning rate of the next update.

    `step` counts the updates applied so far: neither micro-batches nor ranks nor skipped updates move it.
    """
    if schedule.kind is ScheduleKind.CONSTANT:
        return schedule.peak
    if step < schedule.warmup_steps:
        return schedule.peak * step / schedule.warmup_steps
    if schedule.kind is ScheduleKind.CONSTANT_WITH_WARMUP:
        return schedule.peak
    decay_steps = schedule.total_steps - schedule.warmup_steps
    progress = min(1.0, (step - schedule.warmup_steps) / max(1, decay_steps))
    return schedule.minimum + (schedule.peak - schedule.minimum) * _decay(schedule, progress)


def _decay(schedule: LearningRateSchedule, progress: float) -> float:
    """The factor from 1 to 0 as `progress` goes from 0 to 1."""
    if schedule.kind is ScheduleKind.COSINE:
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if schedule.kind is ScheduleKind.POLYNOMIAL:
        return (1.0 - progress) ** schedule.power
    return 1.0 - progress
