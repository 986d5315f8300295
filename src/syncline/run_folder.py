"""The folder of a run: what lies where, and who may write into it."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncline.arguments import TrainingArguments, resolved_yaml
from syncline.callbacks import Evaluation
from syncline.errors import UserError


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

    def timeline(self, rank: int) -> Path:
        """When each action of each step ran on `rank`, with timers on."""
        return self.path / f"timeline-rank{rank}.jsonl"

    def claim(self, overwrite: bool) -> None:
        """Make the folder, empty of an earlier run.

        Raises:
            UserError: if it holds a run and `overwrite` is off, or cannot be written.
        """
        if self.config.exists() and not overwrite:
            raise UserError(
                f"output_dir {self.path}", "it holds a run already", "Name another folder, or set overwrite_output_dir"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for entry in (
                self.config,
                self.metrics,
                self.program,
                self.evaluation,
                *self.path.glob("timeline-rank*.jsonl"),
            ):
                entry.unlink(missing_ok=True)
            for folder in (self.model, self.tensorboard):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:
            wrong = f"it cannot be written: {error.strerror}"
            raise UserError(f"output_dir {self.path}", wrong, "Name a folder of yours") from error

    def write_request(self, arguments: TrainingArguments, program: dict[str, Any]) -> None:
        """What was asked for, and the program that it became."""
        _write_whole(self.config, resolved_yaml(arguments))
        _write_whole(self.program, json.dumps(program) + "\n")

    def write_evaluation(self, evaluation: Evaluation) -> None:
        document = {"loss": evaluation.loss, "perplexity": evaluation.perplexity, "tokens": evaluation.tokens}
        _write_whole(self.evaluation, json.dumps(document) + "\n")


def _write_whole(path: Path, text: str) -> None:
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
