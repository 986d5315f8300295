"""The folder of a run: what lies where, and who may write into it."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncline.arguments import TrainingArguments, resolved_yaml
from syncline.errors import UserError
from syncline.program.program import Program
from syncline.reports.metrics import read_metrics
from syncline.reports.run_page import run_page
from syncline.reports.timeline import read_timelines, timeline_paths
from syncline.reports.trace import write_chrome_trace
from syncline.training.callbacks import Evaluation


@dataclass(frozen=True)
class RunFolder:
    """`output_dir` and what a run keeps there."""

    path: Path

    @staticmethod
    def of(arguments: TrainingArguments) -> RunFolder:
        return RunFolder(Path(arguments.output_dir))

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def program(self) -> Path:
        return self.path / "program.json"

    @property
    def evaluation(self) -> Path:
        """The last evaluation: `loss`, `tokens`, `perplexity`."""
        return self.path / "evaluation.json"

    @property
    def model(self) -> Path:
        """The trained model as a Hugging Face folder."""
        return self.path / "model"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def trace(self) -> Path:
        """The timelines of all ranks as one trace for Perfetto or Chrome, written when a run with timers ends."""
        return self.path / "trace.json"

    @property
    def report(self) -> Path:
        """The run as a page, written when it ends."""
        return self.path / "report.html"

    def claim(self, arguments: TrainingArguments) -> None:
        """Make the folder, and take away what an earlier run of ours has left in it, if that is allowed.

        Nothing is removed from a folder that holds no run, and nothing that this run is to read.

        Raises:
            UserError: if it holds a run and `overwrite_output_dir` is off, holds what a run would write but no run, or
                cannot be written.
        """
        try:
            holds_run = self.config.exists()
            left = [path for path in self._written() if path.exists()]
            self._refuse(arguments, holds_run, left)
            self.path.mkdir(parents=True, exist_ok=True)
            for path in left:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def write_request(self, arguments: TrainingArguments, program: dict[str, Any]) -> None:
        """What was asked for, and the program that it became.

        Raises:
            UserError: if it cannot be written.
        """
        try:
            _write_whole(self.config, resolved_yaml(arguments))
            _write_whole(self.program, json.dumps(program) + "\n")
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def write_evaluation(self, evaluation: Evaluation) -> None:
        """A number that is not finite becomes null."""
        numbers = {"loss": evaluation.loss, "perplexity": evaluation.perplexity, "tokens": evaluation.tokens}
        document = {name: number if math.isfinite(number) else None for name, number in numbers.items()}
        _write_whole(self.evaluation, json.dumps(document, allow_nan=False) + "\n")

    def write_reports(self, program: Program) -> None:
        """What can be read once the run has ended: its page, and the timelines of all ranks, if there are any, as one
        trace.

        Raises `OSError` or `ValueError` when what the run has written cannot be read, or these cannot be written.
        """
        if timeline_paths(self.path):
            with _draft_of(self.trace) as draft, draft.open("w", encoding="utf-8") as file:
                write_chrome_trace(file, program, read_timelines(self.path))
        records = read_metrics(self.metrics) if self.metrics.exists() else []
        evaluation = json.loads(self.evaluation.read_text(encoding="utf-8")) if self.evaluation.exists() else None
        configuration = self.config.read_text(encoding="utf-8") if self.config.exists() else ""
        _write_whole(self.report, run_page(program, configuration, records, read_timelines(self.path), evaluation))

    def _written(self) -> list[Path]:
        """What a run writes."""
        files = [self.config, self.metrics, self.program, self.evaluation, self.trace, self.report]
        drafts = [_draft(path) for path in files]  # Of a run that was killed while it wrote.
        return [*files, *drafts, *timeline_paths(self.path).values(), self.model, self.tensorboard]

    def _refuse(self, arguments: TrainingArguments, holds_run: bool, left: list[Path]) -> None:
        given = f"output_dir {self.path}"
        if holds_run and not arguments.overwrite_output_dir:
            raise UserError(given, "it holds a run already", "Name another folder, or set overwrite_output_dir.")
        if left and not holds_run:
            wrong = f"it holds no run, but {left[0].name}, which a run would replace"
            raise UserError(given, wrong, "Name another folder.")
        inputs = (arguments.model_name_or_path, arguments.tokenizer_name_or_path)
        for name in (*inputs, *arguments.train_data, *arguments.validation_data):
            read = Path(name).expanduser().resolve() if name else None
            for path in left:
                if read is not None and read.is_relative_to(path.resolve()):
                    wrong = f"the run would replace {path}, and is to read {name} from there"
                    raise UserError(given, wrong, "Name another folder.")


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(f"output_dir {path}", f"it cannot be written: {error.strerror}", "Name a folder of yours.")


def _write_whole(path: Path, text: str) -> None:
    with _draft_of(path) as draft:
        draft.write_text(text, encoding="utf-8")


@contextmanager
def _draft_of(path: Path) -> Iterator[Path]:
    """Where to write what shall be at `path` once it is whole."""
    yield _draft(path)
    os.replace(_draft(path), path)


def _draft(path: Path) -> Path:
    return path.with_name(path.name + ".draft")
