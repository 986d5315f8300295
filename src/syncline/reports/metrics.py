"""`metrics.jsonl`: what is known of each optimizer step, a line each."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class StepMetrics:
    """What is known of one optimizer step: one line of `metrics.jsonl`, in this order."""

    step: int
    """Optimizer steps up to and including this one: the first is 1."""
    loss: float
    """Mean token loss of the global batch; NaN when it had no valid token."""
    learning_rate: float
    grad_norm: float
    """Global norm before clipping."""
    tokens: int
    """Valid tokens (those with a label) in the global batch."""
    tokens_per_second: float
    step_seconds: float
    forward_backward_seconds: float
    reduce_wait_seconds: float
    optimizer_seconds: float
    peak_memory_bytes: int
    gradient_bytes: int
    """Peak bytes of gradient storage held by this rank during the step."""
    bytes_sent: int
    """Bytes this rank sent during the step."""
    skipped: bool
    """Whether the update was left out: an overflow, or no valid token."""
    gradient_bytes_held: int = 0
    """Bytes of gradient storage that this rank holds between this step and the next."""
    gathered_bytes: int = 0
    """Peak bytes of parameters that this rank gathered to use and freed again."""
    offloaded_bytes: int = 0
    """Peak bytes of activations of this rank that waited in host memory."""
    reductions: int = 0
    """Collectives on gradient buckets that this rank took part in."""
    bytes_sent_by_group: Mapping[str, int] = field(default_factory=dict)
    """`bytes_sent` by group: `dp`, `sharding`, `pp` and their combinations; `world` is the reported loss."""
    loss_scale: float = 1.0
    """By which losses were scaled up; other than 1 under float16 only."""


_NAMES = tuple(field.name for field in fields(StepMetrics))


def read_metrics(path: Path) -> list[StepMetrics]:
    """The records of a metrics file, also while its run is writing it; null becomes NaN.

    A last line without its end, as a killed run may leave, is left out. Raises `ValueError`, with the line's number,
    for any other line that is not a record.
    """
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    return [_from_line(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def metrics_line(record: StepMetrics) -> str:
    values = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(record).items()
    }
    return json.dumps(values, allow_nan=False) + "\n"


def _from_line(line: str, where: str) -> StepMetrics:
    try:
        written = json.loads(line)
        values: dict[str, Any] = {name: written[name] for name in _NAMES if name in written}
        values.update({name: math.nan for name, value in values.items() if value is None})
        return StepMetrics(**values)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: not a record of a step ({error})") from error
