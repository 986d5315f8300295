"""What a person sees of a running job, on stderr: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
from collections import deque
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from syncline.reports.format import format_bytes
from syncline.reports.metrics import StepMetrics
from syncline.training.callbacks import Callback, Evaluation, TrainControl, TrainState

if TYPE_CHECKING:
    from rich.progress import Progress

RECENT_STEPS = 50
"""The time left is estimated from this many of the latest steps."""


class ProgressMode(str, Enum):
    """How progress is shown."""

    AUTO = "auto"
    """`live` on a terminal, else `plain`."""
    LIVE = "live"
    PLAIN = "plain"
    """The first and the last step, and every `logging_steps`-th, a line each."""
    NONE = "none"


class ProgressReport(Callback):
    """Shows the run on `stream`, stderr by default. Only the main rank shows anything."""

    def __init__(self, mode: ProgressMode, logging_steps: int, stream: TextIO | None = None) -> None:
        self.logging_steps = logging_steps
        self.stream = sys.stderr if stream is None else stream
        self.mode = mode
        if mode is ProgressMode.AUTO:
            self.mode = ProgressMode.LIVE if self.stream.isatty() else ProgressMode.PLAIN
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._last: StepMetrics | None = None
        self._shown = 0
        self._live: Progress | None = None

    def on_train_begin(self, state: TrainState, control: TrainControl, **details: Any) -> None:
        if state.is_main_rank and self.mode is ProgressMode.LIVE:
            self._live = _live_display(self.stream)
            self._live.add_task("", total=state.max_steps, completed=state.step, numbers="")
            self._live.start()

    def on_log(self, state: TrainState, control: TrainControl, *, record: StepMetrics, **details: Any) -> None:
        is_first = self._last is None
        self._last = record
        self._recent.append(record.step_seconds)
        if self._live is not None:
            numbers = format_record(record, state.max_steps, self._seconds_left(state))
            self._live.update(self._live.task_ids[0], completed=record.step, numbers=numbers)
        elif is_first or record.step % self.logging_steps == 0 or record.step == state.max_steps:
            self._show_record(state, record)

    def on_evaluate(self, state: TrainState, control: TrainControl, *, evaluation: Evaluation, **details: Any) -> None:
        self._show(state, format_evaluation(evaluation, state))

    def on_predict(self, state: TrainState, control: TrainControl, *, text: str, **details: Any) -> None:
        self._show(state, f"sample at step {state.step}: {text}")

    def on_save(self, state: TrainState, control: TrainControl, *, path: Path, **details: Any) -> None:
        self._show(state, f"checkpoint: {path}")

    def on_export(self, state: TrainState, control: TrainControl, *, path: Path, **details: Any) -> None:
        self._show(state, f"model: {path}")

    def on_train_end(self, state: TrainState, control: TrainControl, **details: Any) -> None:
        self._stop()
        if self._last is not None and self._last.step != self._shown:
            self._show_record(state, self._last)

    def on_exception(self, state: TrainState, control: TrainControl, *, error: BaseException, **details: Any) -> None:
        self._stop()

    def _show_record(self, state: TrainState, record: StepMetrics) -> None:
        self._shown = record.step
        self._show(state, format_record(record, state.max_steps, self._seconds_left(state)))

    def _show(self, state: TrainState, line: str) -> None:
        if not state.is_main_rank or self.mode is ProgressMode.NONE:
            return
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=self.stream, flush=True)

    def _seconds_left(self, state: TrainState) -> float:
        assert self._last is not None
        return (state.max_steps - self._last.step) * sum(self._recent) / len(self._recent)

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def format_record(record: StepMetrics, max_steps: int, seconds_left: float) -> str:
    """One step on one line; the same fields at the same columns for every step of a run."""
    update = "  skipped" if record.skipped else ""
    return (
        f"step {record.step:>{len(str(max_steps))}}/{max_steps}"
        f"  loss {record.loss:7.4f}"
        f"  lr {_scientific(record.learning_rate):>7}"
        f"  grad norm {record.grad_norm:6.2f}"
        f"  tokens/s {record.tokens_per_second:>9,.0f}"
        f"  memory {format_bytes(record.peak_memory_bytes):>8}"
        f"  left {format_duration(seconds_left):>7}{update}"
    )


def format_evaluation(evaluation: Evaluation, state: TrainState) -> str:
    return (
        f"evaluation at step {state.step}  loss {evaluation.loss:.4f}  perplexity {evaluation.perplexity:.2f}"
        f"  tokens {evaluation.tokens:,}  seconds {evaluation.seconds:.1f}"
    )


def format_duration(seconds: float) -> str:
    """`0:07`, `1:23`, `2:05:00`; `-` where it is unknown."""
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _scientific(value: float) -> str:
    """`3.0e-4`: one digit after the point, the exponent without padding."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _live_display(stream: TextIO) -> Progress:
    """A bar, and the numbers of the latest step beside it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    numbers = TextColumn("{task.fields[numbers]}", markup=False, table_column=Column())  # wraps where it is narrow
    return Progress(BarColumn(bar_width=20), numbers, console=Console(file=stream))
