"""Callbacks that keep the numbers of a run: `metrics.jsonl`, and TensorBoard event files. Only the main rank writes."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from syncline.reports.metrics import StepMetrics, metrics_line, read_metrics
from syncline.training.callbacks import Callback, Evaluation, TrainControl, TrainState

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class MetricsFile(Callback):
    """Writes one JSON line per optimizer step, with the fields of `StepMetrics`; a number that is not finite is null.

    Each line is on its way to the disk before the next step. A run that starts over, or resumes from an earlier step,
    first removes the lines of the steps it is about to repeat.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def on_train_begin(self, state: TrainState, control: TrainControl, **details: Any) -> None:
        if state.is_main_rank:
            self._keep_until(state.step)
            self._file = self.path.open("a", encoding="utf-8")

    def on_log(self, state: TrainState, control: TrainControl, *, record: StepMetrics, **details: Any) -> None:
        if self._file is not None:
            self._file.write(metrics_line(record))
            self._file.flush()

    def on_train_end(self, state: TrainState, control: TrainControl, **details: Any) -> None:
        self._close()

    def on_exception(self, state: TrainState, control: TrainControl, *, error: BaseException, **details: Any) -> None:
        self._close()

    def _keep_until(self, step: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [record for record in read_metrics(self.path) if record.step <= step] if self.path.exists() else []
        draft = self.path.with_name(self.path.name + ".draft")
        draft.write_text("".join(map(metrics_line, kept)), encoding="utf-8")
        os.replace(draft, self.path)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoard(Callback):
    """Writes event files into `folder`: every number of a step under `train/`, evaluations, and generated samples."""

    FLUSH_SECONDS = 5
    """What a killed run may lose."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: SummaryWriter | None = None

    def on_train_begin(self, state: TrainState, control: TrainControl, **details: Any) -> None:
        if state.is_main_rank:
            from torch.utils.tensorboard import SummaryWriter

            # The steps that are about to be repeated are hidden from an earlier run's curves.
            self._writer = SummaryWriter(str(self.folder), purge_step=state.step + 1, flush_secs=self.FLUSH_SECONDS)

    def on_log(self, state: TrainState, control: TrainControl, *, record: StepMetrics, **details: Any) -> None:
        if self._writer is not None:
            for name, value in list(asdict(record).items())[1:]:
                if isinstance(value, dict):
                    for group, each in value.items():
                        self._writer.add_scalar(f"train/{name}/{group}", each, record.step)
                else:
                    self._writer.add_scalar(f"train/{name}", value, record.step)

    def on_evaluate(self, state: TrainState, control: TrainControl, *, evaluation: Evaluation, **details: Any) -> None:
        if self._writer is not None:
            self._writer.add_scalar("evaluation/loss", evaluation.loss, state.step)
            self._writer.add_scalar("evaluation/perplexity", evaluation.perplexity, state.step)

    def on_predict(self, state: TrainState, control: TrainControl, *, text: str, **details: Any) -> None:
        if self._writer is not None:
            self._writer.add_text("sample", text, state.step)

    def on_train_end(self, state: TrainState, control: TrainControl, **details: Any) -> None:
        self._close()

    def on_exception(self, state: TrainState, control: TrainControl, *, error: BaseException, **details: Any) -> None:
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
