"""The loop on real ranks: what it writes, what it fires, and that no number of it depends on the topology."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from syncline.arguments import arguments_from_mapping
from syncline.program.analysis.costs import summary
from syncline.reports.metrics import read_metrics
from syncline.training.callbacks import EVENTS, Callback, TrainControl, TrainState
from syncline.training.job import describe_job
from syncline.training.samples import prepare_samples
from syncline.training.trainer import Trainer

MODEL = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


class Recorder(Callback):
    """Remembers every event."""

    def __init__(self) -> None:
        self.events: list[str] = []


def _remember(event: str) -> Any:
    def remember(self: Recorder, state: TrainState, control: TrainControl, **details: Any) -> None:
        self.events.append(event)

    return remember


for _event in EVENTS:
    setattr(Recorder, _event, _remember(_event))


class StopAfter(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, state: TrainState, control: TrainControl, **details: Any) -> None:
        control.should_stop = state.step >= self.step


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(12):
        lines = [f"line {line} of document {number} says {line * number}" for line in range(15)]
        (folder / f"{number:02}.txt").write_text("\n".join(lines))
    return folder


def keys(text: Path, output: Path, **more: Any) -> dict[str, Any]:
    return {
        "model_config": MODEL,
        "tokenizer_name_or_path": "byte",
        "train_data": str(text),
        "data_cache_folder": str(text.parent / "cache"),
        "validation_split": 0.2,
        "max_seq_length": 32,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "learning_rate": 1e-2,
        "max_steps": 4,
        "output_dir": str(output),
        "progress": "none",
        "report_to": "none",
        **more,
    }


def train_on_rank(rank: int, world_size: int, mapping: dict[str, Any], callbacks: tuple[Callback, ...] = ()) -> dict:
    arguments = arguments_from_mapping(mapping, {"world_size": world_size})
    job = describe_job(arguments)
    recorder = Recorder()
    trainer = Trainer(job, prepare_samples(arguments, job.config), rank, torch.device("cpu"), [recorder, *callbacks])
    evaluation = trainer.train()
    trainer.export()
    trainer.write_reports()
    return {
        "evaluation": evaluation,
        "events": recorder.events,
        "steps": trainer.state.step,
        "summary": summary(job.program),
        "last": trainer.state.last_record,
        "held": trainer.last_result.held_gradient_bytes if trainer.last_result else None,
        "tokens": trainer.state.tokens_seen,
        "updates": trainer.applied_updates,
    }


def test_the_same_run_whatever_the_topology(pool, text: Path, tmp_path: Path):
    """Global batches of 8 samples: the losses, the norms and the evaluation are the same numbers on every rank."""
    layouts = {
        "one": (1, {"gradient_accumulation_steps": 4}),
        "one, k=1": (1, {"per_device_train_batch_size": 8}),
        "data": (2, {"gradient_accumulation_steps": 2}),
        "pipeline": (2, {"pipeline_parallel_degree": 2, "gradient_accumulation_steps": 4}),
        "both": (4, {"pipeline_parallel_degree": 2, "gradient_accumulation_steps": 2}),
    }
    losses, evaluations = {}, {}
    for name, (ranks, more) in layouts.items():
        output = tmp_path / name
        results = pool.run(ranks, train_on_rank, keys(text, output, dtype="float64", **more))
        assert len({result["evaluation"].loss for result in results}) == 1, name
        assert len({result["last"].loss for result in results}) == 1, name
        assert len({result["last"].grad_norm for result in results}) == 1, name
        evaluations[name] = results[0]["evaluation"]
        losses[name] = [
            (record.loss, record.grad_norm, record.tokens) for record in read_metrics(output / "metrics.jsonl")
        ]
    for name in layouts:
        assert losses[name] == [pytest.approx(record, rel=1e-6) for record in losses["one"]], name
        assert evaluations[name].loss == pytest.approx(evaluations["one"].loss, rel=1e-6), name
        assert evaluations[name].tokens == evaluations["one"].tokens, name


@pytest.mark.parametrize("release", [False, True])
def test_what_a_run_counts_is_what_its_program_says(pool, text: Path, tmp_path: Path, release: bool):
    more = {"pipeline_parallel_degree": 2, "gradient_accumulation_steps": 3, "release_grads": release}
    for rank, result in enumerate(pool.run(4, train_on_rank, keys(text, tmp_path, **more))):
        assert result["last"].bytes_sent == result["summary"]["bytes_sent_per_rank"][rank]
        assert result["last"].gradient_bytes == result["summary"]["peak_gradient_bytes_per_rank"][rank]
        assert result["held"] == result["summary"]["gradient_bytes_between_steps_per_rank"][rank]
        assert (result["held"] == 0) is release


def test_the_exported_model_is_what_transformers_loads(pool, text: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    more = {"pipeline_parallel_degree": 2, "model_config": {**MODEL, "tie_word_embeddings": True}}
    evaluation = pool.run(2, train_on_rank, keys(text, tmp_path, **more))[0]["evaluation"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    arguments = arguments_from_mapping(keys(text, tmp_path, **more))
    validation = prepare_samples(arguments, model.config).validation
    assert validation is not None
    total, tokens = 0.0, 0
    for index in range(len(validation)):
        sample = validation[index]
        logits = model(input_ids=torch.as_tensor(sample.input_ids)[None]).logits[0]
        labels = torch.as_tensor(sample.labels)
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        tokens += int((labels != -100).sum())
    assert tokens == evaluation.tokens
    assert total / tokens == pytest.approx(evaluation.loss, abs=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").decode([104, 105]) == "hi"
    written = json.loads((tmp_path / "evaluation.json").read_text())
    assert written["loss"] == evaluation.loss


def test_training_starts_from_the_weights_of_a_folder(pool, text: Path, tmp_path: Path):
    pool.run(1, train_on_rank, keys(text, tmp_path / "first"))
    more = {"model_config": None, "model_name_or_path": str(tmp_path / "first" / "model"), "learning_rate": 0.0}
    first = json.loads((tmp_path / "first" / "evaluation.json").read_text())
    again = keys(text, tmp_path / "second", pipeline_parallel_degree=2, tokenizer_name_or_path=None, **more)
    second = pool.run(2, train_on_rank, again)[0]["evaluation"]
    assert second.loss == pytest.approx(first["loss"], rel=1e-6)


def test_events_come_in_order(pool, text: Path, tmp_path: Path):
    more = {"gradient_accumulation_steps": 2, "max_steps": 2, "eval_steps": 1, "sample_tokens": 2, "sample_prompt": "a"}
    for result in pool.run(2, train_on_rank, keys(text, tmp_path, **more)):
        micro_batch = ["on_forward_begin", "on_forward_end", "on_backward_begin", "on_backward_end", "on_substep_end"]
        step = ["on_step_begin", *micro_batch, *micro_batch, "on_optimizer_step", "on_log", "on_step_end"]
        expected = ["on_init_end", "on_train_begin", "on_predict", "on_epoch_begin", *step, "on_evaluate", *step]
        assert result["events"] == [*expected, "on_evaluate", "on_predict", "on_train_end", "on_export"]


def test_computations_and_bubbles_of_a_pipeline_are_told_with_where_they_belong(pool, text: Path, tmp_path: Path):
    """ZBH1 on two ranks: the second one waits for the first forward, the first one fills what 1F1B would wait."""
    more = {"pipeline_parallel_degree": 2, "pipeline_schedule_mode": "ZBH1", "gradient_accumulation_steps": 2}
    first, second = pool.run(2, told_on_rank, keys(text, tmp_path, max_steps=1, **more))
    assert first == (
        "forward_begin 0.0, forward_end 0.0, forward_begin 0.1, forward_end 0.1, bubble 0 for 1, backward_begin 0.0, "
        "backward_end 0.0, backward_begin 0.1, backward_end 0.1"
    )
    assert second == (
        "bubble 0 for 1, forward_begin 1.0, forward_end 1.0, backward_begin 1.0, forward_begin 1.1, forward_end 1.1, "
        "backward_begin 1.1, backward_end 1.0, backward_end 1.1"
    )


class Told(Callback):
    """Writes down what computations it is told of, and what bubbles."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def on_bubble(self, state: TrainState, control: TrainControl, **details: Any) -> None:
        self.words.append(f"bubble {details['index']} for {details['capacity']:g}")


def _write_down(what: str) -> Any:
    def write_down(self: Told, state: TrainState, control: TrainControl, **details: Any) -> None:
        self.words.append(f"{what} {details['stage']}.{details['micro_batch']}")

    return write_down


for _what in ("forward_begin", "forward_end", "backward_begin", "backward_end"):
    setattr(Told, f"on_{_what}", _write_down(_what))


def told_on_rank(rank: int, world_size: int, keys: dict[str, Any]) -> str:
    arguments = arguments_from_mapping(keys)
    job, told = describe_job(arguments), Told()
    trainer = Trainer(job, prepare_samples(arguments, job.config), rank, torch.device("cpu"), [told])
    trainer.train()
    return ", ".join(told.words)


def test_an_epoch_counts_its_last_window(pool, text: Path, tmp_path: Path):
    """Random samples: 9 of them, two to a micro-batch, two micro-batches to a step, 3 epochs: 3 updates per epoch."""
    more = {
        "train_data": "random-tokens",
        "random_token_samples": 9,
        "gradient_accumulation_steps": 2,
        "max_steps": -1,
        "num_train_epochs": 3,
        "validation_split": 0,
    }
    (result,) = pool.run(1, train_on_rank, keys(text, tmp_path, **more))
    assert result["steps"] == result["updates"] == 9
    assert result["tokens"] == 3 * 9 * 32
    assert result["events"].count("on_epoch_begin") == result["events"].count("on_epoch_end") == 3
    tokens = [record.tokens for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert tokens == [4 * 32, 4 * 32, 32] * 3


def test_a_callback_stops_all_ranks(pool, text: Path, tmp_path: Path):
    for result in pool.run(2, train_on_rank, keys(text, tmp_path, max_steps=50), (StopAfter(3),)):
        assert result["steps"] == 3


def test_early_stopping_ends_a_run_that_learns_nothing(pool, text: Path, tmp_path: Path):
    more = {"learning_rate": 0.0, "max_steps": 50, "eval_steps": 1, "early_stopping_patience": 2}
    for result in pool.run(2, train_on_rank, keys(text, tmp_path, **more)):
        assert result["steps"] == 3


def test_the_same_weights_are_not_evaluated_twice(pool, text: Path, tmp_path: Path):
    more = {"max_steps": 50, "eval_steps": 2}
    for result in pool.run(2, train_on_rank, keys(text, tmp_path, **more), (StopAfter(4),)):
        assert result["events"].count("on_evaluate") == 2


def test_a_step_without_a_valid_token_updates_nothing(pool, text: Path, tmp_path: Path):
    """Neither the parameters nor the schedule move, with and without storage that is freed after the update."""
    for release in (False, True):
        more = {"data_parallel_degree": 2, "max_steps": 3, "release_grads": release}
        for before, after, skipped, updates in pool.run(2, train_masked_on_rank, keys(text, tmp_path, **more)):
            assert skipped == [False, True, False]
            assert updates == 2
            assert before == after


def train_masked_on_rank(rank: int, world_size: int, mapping: dict[str, Any]) -> tuple:
    """Trains three steps, the second of them with every label masked; returns the parameters around that one."""
    arguments = arguments_from_mapping(mapping, {"world_size": world_size})
    job = describe_job(arguments)
    data = prepare_samples(arguments, job.config)
    trainer = Trainer(job, data, rank, torch.device("cpu"))
    load = trainer.loader.step
    masked = [replace(each, labels=torch.full_like(each.labels, -100), counted_tokens=0) for each in load(1)]
    trainer.loader = SecondStepMasked(load, masked)  # type: ignore[assignment]
    states: list[list[float]] = []
    recorder = SumAfterSteps(trainer, states)
    trainer.callbacks.members = (recorder,)
    trainer.train()
    return states[0], states[1], recorder.skipped, trainer.applied_updates


class SecondStepMasked:
    def __init__(self, load: Any, masked: list) -> None:
        self.load, self.masked = load, masked

    def step(self, step: int) -> list:
        return self.masked if step == 1 else self.load(step)


class SumAfterSteps(Callback):
    """Keeps every parameter's sum after each step."""

    def __init__(self, trainer: Trainer, states: list[list[float]]) -> None:
        self.trainer, self.states = trainer, states
        self.skipped: list[bool] = []

    def on_log(self, state: TrainState, control: TrainControl, *, record: Any, **details: Any) -> None:
        self.skipped.append(record.skipped)

    def on_step_end(self, state: TrainState, control: TrainControl, **details: Any) -> None:
        parameters = self.trainer.engine.parameters_by_name().values()
        self.states.append([parameter.double().sum().item() for parameter in parameters])


def test_bfloat16_keeps_float32_master_weights(pool, text: Path, tmp_path: Path):
    """With a learning rate below what bfloat16 can resolve, only master weights let the loss fall."""
    more = {"bf16": True, "max_steps": 30, "learning_rate": 3e-4, "lr_scheduler_type": "constant"}
    pool.run(2, train_on_rank, keys(text, tmp_path, **more))
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert records[-1].loss < records[0].loss - 0.2


def test_recomputing_changes_no_number(pool, text: Path, tmp_path: Path):
    plain, recomputed = (
        [r.loss for r in pool_metrics(pool, text, tmp_path / str(on), recompute=on)] for on in (False, True)
    )
    assert plain == recomputed


def pool_metrics(pool: Any, text: Path, output: Path, **more: Any) -> list:
    pool.run(1, train_on_rank, keys(text, output, **more))
    return read_metrics(output / "metrics.jsonl")


def test_timers_write_when_each_action_ran(pool, text: Path, tmp_path: Path):
    more = {"gradient_accumulation_steps": 2, "max_steps": 2, "data_parallel_config": "enable_timer"}
    pool.run(2, train_on_rank, keys(text, tmp_path, **more))
    entries = [json.loads(line) for line in (tmp_path / "timeline-rank1.jsonl").read_text().splitlines()]
    assert {entry["step"] for entry in entries} == {1, 2}
    assert {"forward", "backward", "reduce_gradients", "optimizer_step"} <= {entry["action"] for entry in entries}
    assert all(entry["end"] >= entry["start"] for entry in entries)
    for step in (1, 2):
        of_step = [entry for entry in entries if entry["step"] == step]
        assert [entry["position"] for entry in of_step] == list(range(len(of_step)))
        (last,) = (entry for entry in of_step if (entry["action"], entry.get("micro_batch")) == ("backward", 1))
        inside = [entry for entry in of_step if "during" in entry]
        assert {entry["action"] for entry in inside} >= {"reduce_gradients"}
        # The last bucket is full when the backward has added the last gradient, and so within it.
        assert all(last["start"] <= entry["start"] <= entry["end"] <= last["end"] for entry in inside)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["tid"] for event in events} == {0, 1}
    assert sum(event["name"] == "backward 1" for event in events) == 2 * 2
