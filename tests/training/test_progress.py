import io
import math
from dataclasses import replace
from pathlib import Path

import pytest

from syncline.reports.format import format_bytes
from syncline.training.callbacks import Evaluation, TrainControl, TrainState
from syncline.training.progress import ProgressMode, ProgressReport, format_duration, format_record
from tests.training.test_trackers import RECORD


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(
    mode: ProgressMode, stream: io.StringIO, steps: int = 7, max_steps: int = 7, is_main_rank: bool = True
) -> ProgressReport:
    """A run of `steps` steps of half a second each, reported every third."""
    report = ProgressReport(mode, logging_steps=3, stream=stream)
    state = TrainState(max_steps=max_steps, is_main_rank=is_main_rank)
    report.on_train_begin(state, TrainControl())
    for step in range(1, steps + 1):
        report.on_log(state, TrainControl(), record=replace(RECORD, step=step))
    report.on_train_end(state, TrainControl())
    return report


def test_the_line_of_a_step():
    record = replace(
        RECORD, step=12, loss=4.1234, grad_norm=1.234, tokens_per_second=8123.4, peak_memory_bytes=512 * 2**20
    )
    assert format_record(record, 120, 83.2) == (
        "step  12/120  loss  4.1234  lr  3.0e-4  grad norm   1.23  tokens/s     8,123  memory  512 MiB  left    1:23"
    )


def test_lines_are_aligned_and_a_skipped_step_says_so():
    lines = [
        format_record(replace(RECORD, step=step, loss=loss, grad_norm=norm, learning_rate=rate), 1000, 10.0)
        for step, loss, norm, rate in [(1, 10.5, 0.01, 0.0), (1000, 0.1, 123.4, 1e-10), (5, math.nan, math.nan, 1.0)]
    ]
    assert len({tuple(line.index(name) for name in ("loss", "lr", "grad", "tokens", "left")) for line in lines}) == 1
    assert format_record(replace(RECORD, skipped=True), 10, 1.0).endswith("  skipped")


def test_plain_lines_are_the_first_the_last_and_every_third():
    stream = io.StringIO()
    run(ProgressMode.PLAIN, stream)
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/7", "3/7", "6/7", "7/7"]
    assert [line.split()[-1] for line in lines] == ["0:03", "0:02", "0:00", "0:00"]


def test_the_last_step_of_a_run_that_stops_early_is_shown():
    stream = io.StringIO()
    run(ProgressMode.PLAIN, stream, steps=5, max_steps=100)
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/100", "3/100", "5/100"]


def test_other_events_have_lines_too():
    stream = io.StringIO()
    report = ProgressReport(ProgressMode.PLAIN, logging_steps=1, stream=stream)
    state, control = TrainState(max_steps=9, is_main_rank=True, step=4), TrainControl()
    report.on_evaluate(state, control, evaluation=Evaluation(loss=math.log(4), tokens=1024, seconds=1.25))
    report.on_predict(state, control, text="[bold]once[/bold]")
    report.on_save(state, control, path=Path("out/checkpoint-4"))
    report.on_export(state, control, path=Path("out/model"))
    assert stream.getvalue().splitlines() == [
        "evaluation at step 4  loss 1.3863  perplexity 4.00  tokens 1,024  seconds 1.2",
        "sample at step 4: [bold]once[/bold]",
        "checkpoint: out/checkpoint-4",
        "model: out/model",
    ]


def test_a_terminal_gets_a_live_display_and_its_cursor_back(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    assert run(ProgressMode.AUTO, stream).mode is ProgressMode.LIVE
    shown = stream.getvalue()
    assert "7/7" in shown
    assert "4.2500" in shown
    assert "0:00" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_a_failure_stops_the_live_display():
    stream = Terminal()
    report = ProgressReport(ProgressMode.LIVE, logging_steps=1, stream=stream)
    state = TrainState(max_steps=9, is_main_rank=True)
    report.on_train_begin(state, TrainControl())
    report.on_exception(state, TrainControl(), error=RuntimeError())
    shown = stream.getvalue()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_a_file_gets_plain_lines():
    assert run(ProgressMode.AUTO, io.StringIO()).mode is ProgressMode.PLAIN


@pytest.mark.parametrize(
    ("mode", "is_main_rank"), [(ProgressMode.NONE, True), (ProgressMode.LIVE, False), (ProgressMode.PLAIN, False)]
)
def test_silence(mode, is_main_rank):
    stream = Terminal()
    run(mode, stream, is_main_rank=is_main_rank)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "2 KiB"), (512 * 2**20, "512 MiB"), (1.5 * 2**30, "1.50 GiB")],
)
def test_bytes(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(7, "0:07"), (83.4, "1:23"), (7500, "2:05:00"), (59.7, "1:00"), (math.nan, "-")]
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text
