"""report.html: a run's figures, its loss, where its time went, and a step as it was planned and as it was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from statistics import median
from typing import Any

from syncline.program.program import Program
from syncline.reports.drawing import measured_drawing, shown_ranks, simulated_drawing
from syncline.reports.format import format_bytes
from syncline.reports.metrics import StepMetrics
from syncline.reports.page import Card, cards, drawings, page, texts
from syncline.reports.timeline import Entry, Timelines

MOST_POINTS = 1000
"""Of the curve; of more steps each point is a mean."""


def run_page(
    program: Program,
    configuration: str,
    records: Sequence[StepMetrics],
    timelines: Timelines,
    evaluation: Mapping[str, Any] | None = None,
) -> str:
    """The page of a run that has ended; `records` are its metrics, and `evaluation` its last evaluation."""
    steps = f"{len(records)} optimizer steps on {program.topology.world_size} ranks"
    return page("Syncline: a run", f"A run: {steps}", _content(program, configuration, records, timelines, evaluation))


def _content(
    program: Program,
    configuration: str,
    records: Sequence[StepMetrics],
    timelines: Timelines,
    evaluation: Mapping[str, Any] | None,
) -> Iterator[str]:
    if records:
        yield cards(_figures(records, evaluation))
        yield "<h2>Loss</h2>"
        yield _curve([(record.step, record.loss) for record in records if math.isfinite(record.loss)])
        yield "<h2>Where the time went</h2>"
        yield _phases(records)
    yield "<h2>A step</h2>"
    shown = [simulated_drawing(program)]
    step = _typical_step(records)
    measured = _entries_of(step, timelines)
    if all(measured.get(rank) for rank in shown_ranks(program)):
        shown.append(measured_drawing(program, measured, step))
    else:
        yield (
            '<p class="quiet">This run was not timed action by action. With <code>pipeline_parallel_config: '
            "enable_timer</code> a measured step is drawn beside the program.</p>"
        )
    yield from drawings(shown)
    yield from texts(program, configuration)


def _figures(records: Sequence[StepMetrics], evaluation: Mapping[str, Any] | None) -> list[Card]:
    warm = records[1:] or records
    last = records[-1]
    figures = [
        (_number(last.loss), f"loss of step {last.step}"),
        (f"{median(record.step_seconds for record in warm):.3g} s", "a step (median)"),
        (f"{median(record.tokens_per_second for record in warm):,.0f}", "tokens a second (median)"),
        (format_bytes(max(record.peak_memory_bytes for record in records)), "peak memory of rank 0"),
        (format_bytes(max(record.gradient_bytes for record in records)), "peak of its gradients"),
        (format_bytes(last.bytes_sent), "sent by it in a step"),
    ]
    if evaluation is not None and evaluation.get("loss") is not None:
        figures.insert(1, (_number(evaluation["loss"]), "loss of the last evaluation"))
    skipped = sum(record.skipped for record in records)
    return [*figures, *([(f"{skipped}", "steps skipped")] if skipped else [])]


def _curve(points: Sequence[tuple[int, float]]) -> str:
    """The loss over the steps, as an SVG."""
    if not points:
        return '<p class="quiet">No step had a finite loss.</p>'
    size = -(-len(points) // MOST_POINTS)
    means = [_mean(points[start : start + size]) for start in range(0, len(points), size)]
    steps, losses = [step for step, _ in means], [loss for _, loss in means]
    low, high = min(losses), max(losses)
    width, height = max(1e-9, steps[-1] - steps[0]), max(1e-9, high - low)
    line = " ".join(
        f"{1000 * (step - steps[0]) / width:.1f},{192 - 184 * (loss - low) / height:.1f}" for step, loss in means
    )
    return (
        f'<svg class="curve" viewBox="0 0 1000 200" preserveAspectRatio="none" role="img" aria-label="loss">'
        f'<polyline points="{line}"/></svg>'
        f'<p class="quiet">From {_number(losses[0])} at step {points[0][0]} to {_number(losses[-1])} at step '
        f"{points[-1][0]}; between {_number(low)} and {_number(high)}.</p>"
    )


def _mean(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    return sum(step for step, _ in points) / len(points), sum(loss for _, loss in points) / len(points)


def _phases(records: Sequence[StepMetrics]) -> str:
    """The shares of a step's parts on rank 0, without the first step."""
    warm = records[1:] or records
    total = sum(record.step_seconds for record in warm)
    parts = (
        ("forward and backward, and messages", sum(record.forward_backward_seconds for record in warm), "forward"),
        ("waiting for reductions and gathers", sum(record.reduce_wait_seconds for record in warm), "reduction"),
        ("updating", sum(record.optimizer_seconds for record in warm), "update"),
    )
    rest = max(0.0, total - sum(seconds for _, seconds, _ in parts))
    shares = [
        (what, seconds / total, colour) for what, seconds, colour in (*parts, ("data and the rest", rest, "other"))
    ]
    bars = "".join(
        f'<div style="flex: {share:.5f}; background: var(--{colour}); height: 1.1rem" title="{escape(what)}"></div>'
        for what, share, colour in shares
    )
    words = "".join(
        f'<span style="--colour: var(--{colour})">{escape(what)}: {share:.1%}</span>' for what, share, colour in shares
    )
    return (
        f'<div style="display: flex; border-radius: .4rem; overflow: hidden">{bars}</div>'
        f'<div class="legend">{words}</div>'
    )


def _typical_step(records: Sequence[StepMetrics]) -> int:
    """The step of median length; not the first one, if there are others. 0 where there is none."""
    lengths = sorted((record.step_seconds, record.step) for record in records[1:] or records)
    return lengths[len(lengths) // 2][1] if lengths else 0


def _entries_of(step: int, timelines: Timelines) -> dict[int, Sequence[Entry]]:
    """By rank what was measured of one step."""
    return {
        rank: next((entries for entries in steps if entries[0]["step"] == step), ())
        for rank, steps in timelines.items()
    }


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "not finite"
