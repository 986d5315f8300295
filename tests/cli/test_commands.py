"""The commands as users run them, each in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from syncline.reports.metrics import read_metrics

CONFIG: dict[str, Any] = {
    "model_config": {
        "model_type": "llama",
        "vocab_size": 257,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "train_data": "random-tokens",
    "random_token_samples": 64,
    "max_seq_length": 16,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 8,
    "max_steps": 3,
    "nproc_per_node": 2,
    "device": "cpu",
    "logging_steps": 1,
}


def write_config(path: Path, **more: Any) -> Path:
    path.write_text(yaml.safe_dump({**CONFIG, **more}))
    return path


def syncline(*words: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "syncline", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def test_train_leaves_what_it_promises(tmp_path: Path):
    config = write_config(tmp_path / "config.yaml")
    output = tmp_path / "run"
    run = syncline("train", config, "--output_dir", output, "--pipeline_parallel_config", "enable_release_grads")
    assert run.returncode == 0, run.stderr
    assert "step 3/3" in run.stderr
    assert "reductions per step" in run.stdout
    assert "released between steps" in run.stdout
    program = json.loads((output / "program.json").read_text())
    records = read_metrics(output / "metrics.jsonl")
    assert [record.step for record in records] == [1, 2, 3]
    for record in records:
        assert record.bytes_sent == program["summary"]["bytes_sent_per_rank"][0]
        assert record.gradient_bytes == program["summary"]["peak_gradient_bytes_per_rank"][0]
        assert record.tokens == 2 * 8 * 2 * 16
    line = json.loads((output / "metrics.jsonl").read_text().splitlines()[0])
    promised = [
        *("step", "loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second", "step_seconds"),
        *("forward_backward_seconds", "reduce_wait_seconds", "optimizer_seconds", "peak_memory_bytes"),
        *("gradient_bytes", "bytes_sent", "skipped"),
    ]
    assert list(line)[: len(promised)] == promised
    assert sum(line["bytes_sent_by_group"].values()) == line["bytes_sent"]
    assert (output / "model" / "model.safetensors").is_file()
    assert list((output / "tensorboard").iterdir())
    resolved = yaml.safe_load((output / "config.yaml").read_text())
    assert resolved["gradient_accumulation_steps"] == 8
    again = syncline("train", config, "--output_dir", output)
    assert again.returncode == 2
    assert "overwrite_output_dir" in again.stderr


def test_activations_in_host_memory_are_counted_and_on_the_cpu_a_warning(tmp_path: Path):
    config = write_config(tmp_path / "config.yaml", offload_activations=True)
    run = syncline("train", config, "--output_dir", tmp_path / "run")
    assert run.returncode == 0, run.stderr
    assert "warning: offload_activations saves nothing here: training runs on the CPU" in run.stderr
    assert all(record.offloaded_bytes > 0 for record in read_metrics(tmp_path / "run" / "metrics.jsonl"))


def test_after_accumulation_reduces_once_where_the_plain_mode_reduces_eight_times(tmp_path: Path):
    config = write_config(tmp_path / "config.yaml")
    plain, once = (
        json.loads(syncline("program", config, "--json", *options).stdout)
        for options in (
            ("--gradient_sync", "every_micro_batch"),
            ("--data_parallel_config", "gradient_sync_after_accumulate"),
        )
    )
    assert set(plain["summary"]["reductions_per_bucket"].values()) == {8}
    assert set(once["summary"]["reductions_per_bucket"].values()) == {1}
    assert plain["summary"]["reductions_per_step"] == 8 * once["summary"]["reductions_per_step"]
    kinds = [action["action"] for action in once["ranks"][0]["actions"]]
    assert kinds.index("reduce_gradients") > max(index for index, kind in enumerate(kinds) if kind == "backward")


def test_program_shows_what_an_option_moves(tmp_path: Path):
    config = write_config(tmp_path / "config.yaml", data_parallel_config="gradient_sync_after_accumulate")
    shown = syncline("program", config, "--without", "gradient_sync_after_accumulate")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0].split("  ")[1] == "without gradient_sync_after_accumulate"
    assert any(line.startswith("< reduce gradients 0 sum over dp during backward 7") for line in lines)
    assert any(line.endswith("> reduce gradients 0 sum over dp") for line in lines)
    page = tmp_path / "page.html"
    assert syncline("program", config, "--html", page, "--rank", 1).returncode == 0
    assert "reduce gradients 0 sum over dp" in page.read_text()
    both = json.loads(syncline("program", config, "--without", "gradient_sync_after_accumulate", "--json").stdout)
    assert both["with"]["summary"]["bytes_sent_per_rank"] == both["without"]["summary"]["bytes_sent_per_rank"]
    assert both["with"]["ranks"] != both["without"]["ranks"]
    unset = syncline("program", config, "--without", "enable_release_grads")
    assert unset.returncode == 2
    assert "no config sets this flag" in unset.stderr


def test_verify_prints_its_report(tmp_path: Path):
    config = write_config(tmp_path / "config.yaml", pipeline_parallel_degree=2, gradient_accumulation_steps=2)
    run = syncline("verify", config, "--json")
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["passed"] is True
    assert 0 <= report["max_relative_error"] <= report["tolerance"] == 1e-10
    assert report["steps"] == 3
    assert report["parameters"] > 20
    assert set(report) == {
        *("passed", "parameters", "max_relative_error", "worst_parameter", "worst_rank", "tolerance", "steps")
    }


def test_torchrun_starts_ranks_as_well(tmp_path: Path):
    config = write_config(tmp_path / "config.yaml", gradient_accumulation_steps=1, nproc_per_node=None)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*torchrun, "-m", "syncline", "train", str(config), "--output_dir", str(tmp_path / "run")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 3
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["world_size"] == 2


def test_under_torchrun_a_request_is_checked_as_well(tmp_path: Path):
    """Stages cannot be cut from a model without a plan; and what has no effect is said once."""
    model = {"model_type": "gpt2", "vocab_size": 257, "n_embd": 32, "n_layer": 2, "n_head": 4}
    config = write_config(tmp_path / "config.yaml", nproc_per_node=None, model_config=model, pipeline_parallel_degree=2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*torchrun, "-m", "syncline", "train", str(config), "--output_dir", str(tmp_path / "run")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode != 0
    assert "transformers has no pipeline plan for this model" in run.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_ends_within_seconds_without_orphans(tmp_path: Path, number: signal.Signals):
    config = write_config(tmp_path / "config.yaml", max_steps=100_000)
    command = [sys.executable, "-m", "syncline", "train", str(config), "--output_dir", str(tmp_path / "run")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step "):
            break
    ranks = _children(process.pid)
    assert len(ranks) >= 2
    began = time.monotonic()
    process.send_signal(number)
    process.stderr.read()
    assert process.wait(timeout=20) == 128 + number
    assert time.monotonic() - began < 15
    assert not [rank for rank in ranks if _alive(rank)]


def _children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent:
                found.append(int(entry.name))
    return found


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


# ---- Requests that are wrong ----


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gradient_acumulation_steps", "2"], "gradient_accumulation_steps"),
        (["--max_seq_length", "-3"], "max_seq_length"),
        (["--pipeline_parallel_degree", "3"], "cannot be divided"),
        (["--pipeline_parallel_degree", "4", "--nproc_per_node", "4"], "every stage needs one"),
        (["--data_parallel_config", "gradient_sync_after_acumulate"], "gradient_sync_after_accumulate"),
        (["--tensor_parallel_degree", "2"], "arrives with"),
        (["--train_data", "/no/such/file.txt"], "/no/such/file.txt"),
        (["--model_config.model_type", "lama"], "llama"),
        (["--model_config.vocab_size", "100", "--train_data", "python-stdlib"], "model_config.vocab_size: 257"),
        (["--device", "cuda"], "GPUs"),
    ],
)
def test_bad_requests_end_before_any_process_starts(tmp_path: Path, words: list[str], said: str):
    config = write_config(tmp_path / "config.yaml")
    run = syncline("train", config, "--output_dir", tmp_path / "run", *words)
    assert run.returncode == 2, run.stderr
    assert said in run.stderr
    assert "Traceback" not in run.stderr
    assert len([line for line in run.stderr.splitlines() if "warning" not in line]) == 1
    assert not (tmp_path / "run").exists()


def test_unknown_commands_and_missing_configs():
    assert "Did you mean train?" in syncline("trian").stderr
    assert syncline("plan", "x.yaml").returncode == 2
    assert "no CONFIG" in syncline("verify").stderr
    assert syncline("program", "/no/such.yaml").returncode == 2


def test_help_needs_nothing_heavy():
    code = (
        "import sys; from syncline.cli.main import main; main(sys.argv[1:]); "
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    for words in (["--help"], ["train", "--help"], ["program", "--help"], ["verify", "--help"]):
        run = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
        assert run.stderr.strip() == "False"
    assert "--gradient_accumulation_steps" in syncline("train", "--help").stdout
