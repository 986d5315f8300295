import json
import math
from dataclasses import replace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from syncline.reports.metrics import StepMetrics, read_metrics
from syncline.training.callbacks import Evaluation, TrainControl, TrainState
from syncline.training.trackers import MetricsFile, TensorBoard
from tests.records import RECORD

KEYS = [
    "step",
    "loss",
    "learning_rate",
    "grad_norm",
    "tokens",
    "tokens_per_second",
    "step_seconds",
    "forward_backward_seconds",
    "reduce_wait_seconds",
    "optimizer_seconds",
    "peak_memory_bytes",
    "gradient_bytes",
    "bytes_sent",
    "skipped",
    "gradient_bytes_held",
    "gathered_bytes",
    "offloaded_bytes",
    "reductions",
    "bytes_sent_by_group",
    "loss_scale",
]


def records(*steps: int) -> list[StepMetrics]:
    return [replace(RECORD, step=step, loss=5.0 / step) for step in steps]


def logged(tracker, written: list[StepMetrics], start: int = 0, is_main_rank: bool = True) -> None:
    """Run `tracker` from step `start` through the records and up to, but without, the end of the run."""
    state = TrainState(max_steps=10, is_main_rank=is_main_rank, step=start)
    tracker.on_train_begin(state, TrainControl())
    for record in written:
        tracker.on_log(state, TrainControl(), record=record)


def test_a_line_has_exactly_the_promised_keys(tmp_path):
    logged(MetricsFile(tmp_path / "run" / "metrics.jsonl"), [RECORD])
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert list(json.loads(line)) == KEYS


def test_every_line_is_readable_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logged(MetricsFile(path), records(1, 2, 3))
    assert read_metrics(path) == records(1, 2, 3)


def test_what_is_not_finite_is_null_in_json_and_nan_when_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logged(MetricsFile(path), [replace(RECORD, loss=math.nan, grad_norm=math.inf)])
    values = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert (values["loss"], values["grad_norm"]) == (None, None)
    assert math.isnan(read_metrics(path)[0].loss)


def test_a_torn_last_line_is_left_out_wherever_it_breaks(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logged(MetricsFile(path), records(1, 2))
    whole = path.read_bytes()
    second = whole.index(b"\n") + 1
    for length in range(second, len(whole)):
        path.write_bytes(whole[:length])
        assert read_metrics(path) == records(1)


def test_a_resumed_run_continues_after_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logged(MetricsFile(path), records(1, 2, 3, 4))
    path.write_bytes(path.read_bytes()[:-9])
    logged(MetricsFile(path), records(3, 4, 5), start=2)
    assert [record.step for record in read_metrics(path)] == [1, 2, 3, 4, 5]


def test_a_run_that_starts_over_starts_the_file_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logged(MetricsFile(path), records(1, 2, 3))
    logged(MetricsFile(path), records(1))
    assert read_metrics(path) == records(1)


@pytest.mark.parametrize("line", ["{", "[]", '{"step": 1}', ""])
def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    logged(MetricsFile(path), records(1))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match="line 2: not a record"):
        read_metrics(path)


@pytest.mark.parametrize("tracker", [lambda path: MetricsFile(path / "metrics.jsonl"), TensorBoard])
def test_other_ranks_write_nothing(tmp_path, tracker):
    logged(tracker(tmp_path), [RECORD], is_main_rank=False)
    assert list(tmp_path.iterdir()) == []


def test_tensorboard(tmp_path):
    tracker = TensorBoard(tmp_path)
    logged(tracker, records(1, 2))
    state = TrainState(max_steps=10, is_main_rank=True, step=2)
    tracker.on_evaluate(state, TrainControl(), evaluation=Evaluation(loss=math.log(4), tokens=8, seconds=1.0))
    tracker.on_predict(state, TrainControl(), text="Once upon a time")
    tracker.on_train_end(state, TrainControl())
    events = EventAccumulator(str(tmp_path)).Reload()
    numbers = [key for key in KEYS[1:] if key != "bytes_sent_by_group"]
    scalars = {f"train/{key}" for key in (*numbers, "bytes_sent_by_group/dp")} | {
        "evaluation/loss",
        "evaluation/perplexity",
    }
    assert set(events.Tags()["scalars"]) == scalars
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 5.0), (2, 2.5)]
    assert events.Scalars("evaluation/perplexity")[0].value == pytest.approx(4.0)
    assert b"Once upon a time" in events.Tensors("sample/text_summary")[0].tensor_proto.string_val[0]
