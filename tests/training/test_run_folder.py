"""What a run may take away, and what not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from syncline.arguments import TrainingArguments, arguments_from_mapping
from syncline.errors import UserError
from syncline.training.callbacks import Evaluation
from syncline.training.run_folder import RunFolder


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    return arguments_from_mapping({"output_dir": str(folder), "model_config": {"model_type": "llama"}, **more})


def a_run(folder: Path) -> RunFolder:
    run = RunFolder(folder)
    run.claim(arguments(folder))
    run.write_request(arguments(folder), {"ranks": []})
    run.metrics.write_text("{}\n")
    run.model.mkdir()
    (run.model / "model.safetensors").write_bytes(b"weights")
    return run


def test_an_earlier_run_is_replaced_only_when_asked(tmp_path: Path):
    run = a_run(tmp_path / "run")
    with pytest.raises(UserError, match="overwrite_output_dir"):
        run.claim(arguments(run.path))
    assert run.model.exists()
    run.claim(arguments(run.path, overwrite_output_dir=True))
    assert list(run.path.iterdir()) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_is_no_run_loses_nothing(tmp_path: Path, overwrite: bool):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "theirs.py").write_text("x = 1")
    with pytest.raises(UserError, match="it holds no run, but model"):
        RunFolder(tmp_path).claim(arguments(tmp_path, overwrite_output_dir=overwrite))
    assert (tmp_path / "model" / "theirs.py").read_text() == "x = 1"


def test_other_files_stay(tmp_path: Path):
    run = a_run(tmp_path / "run")
    (run.path / "notes.txt").write_text("mine")
    run.claim(arguments(run.path, overwrite_output_dir=True))
    assert (run.path / "notes.txt").read_text() == "mine"


def test_a_run_does_not_remove_what_it_is_to_read(tmp_path: Path):
    run = a_run(tmp_path / "run")
    again = arguments(run.path, overwrite_output_dir=True, model_config=None, model_name_or_path=str(run.model))
    with pytest.raises(UserError, match="is to read"):
        run.claim(again)
    assert (run.model / "model.safetensors").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        RunFolder(tmp_path / "file" / "run").claim(arguments(tmp_path / "file" / "run"))


def test_an_evaluation_is_always_valid_json(tmp_path: Path):
    RunFolder(tmp_path).write_evaluation(Evaluation(float("nan"), 0, 0.1))
    assert json.loads((tmp_path / "evaluation.json").read_text()) == {"loss": None, "perplexity": None, "tokens": 0}
