"""The figures of `gradient_life.py` as a section of Markdown. Every sentence about them is computed from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from measuring import MemoryFigures
from ranks import CONDITIONS
from reporting import Spread, mebibytes, milliseconds, pair_ratios, table, verdict
from trainers import Workload, describe

BASELINE = "every"
"""The mode without any option, to which the tables compare the others."""


@dataclass(frozen=True)
class Comparison:
    """One choice: the same run with it and without it."""

    what: str
    chosen: str
    otherwise: str


COMPARISONS = (
    Comparison("`gradient_sync_after_accumulate`, against a reduction after every micro-batch", "after", "every"),
    Comparison("`gradient_sync_after_accumulate`, against the overlapped default", "after", "last"),
    Comparison("`enable_allreduce_avg_in_gradient_scale`, every micro-batch", "every_average", "every"),
    Comparison("`enable_allreduce_avg_in_gradient_scale`, after accumulation", "after_average", "after"),
    Comparison("`enable_release_grads`, after accumulation", "after_release", "after"),
    Comparison("`enable_release_grads`, overlapped default", "last_release", "last"),
    Comparison("Syncline against DDP, both after every micro-batch", "every", "ddp_every"),
    Comparison("Syncline's default against DDP with `no_sync`", "last", "ddp_no_sync"),
    Comparison(
        "Syncline's default against DDP with `no_sync` and `gradient_as_bucket_view`", "last", "ddp_bucket_view"
    ),
)


def report(figures: Mapping[str, Any]) -> str:
    """`figures` is what `gradient_life.measure` returns."""
    memory = {k: {key: MemoryFigures(**each) for key, each in modes.items()} for k, modes in figures["memory"].items()}
    lines = [*_introduction(figures)]
    for k, seconds in figures["seconds"].items():
        lines += [f"### k = {k}", "", *_table(figures["modes"], seconds, memory[k]), ""]
    lines += ["### Reading", "", *_reading(figures["seconds"], memory)]
    return "\n".join(lines)


def _introduction(figures: Mapping[str, Any]) -> Iterator[str]:
    workload = Workload(**figures["workload"])
    yield "## The life of a gradient"
    yield ""
    yield f"{figures['machine']}; {figures['repetitions']} repetitions."
    yield ""
    yield (
        f"Llama ({describe(workload)}), buckets of at most {workload.bucket_mebibytes} MiB, {CONDITIONS}. For each k "
        "all modes live in the same processes and take turns, in an order drawn anew for each repetition; a ratio "
        "compares two steps of the same repetition. *Sent* is per rank and step: as the trainer counts it, and as the "
        "kernel counts it on the loopback. Memory is that of the larger rank, each mode alone in processes of its own."
    )
    yield ""


def _table(
    names: Mapping[str, str], seconds: Mapping[str, Sequence[float]], memory: Mapping[str, MemoryFigures]
) -> list[str]:
    head = (
        "mode",
        "step, ms",
        "to every micro-batch",
        "sent, MiB",
        "on the wire, MiB",
        "peak gradients, MiB",
        "between steps, MiB",
        "peak resident, MiB",
    )
    return table(head, [(name, *_row(key, seconds, memory[key])) for key, name in names.items()])


def _row(key: str, seconds: Mapping[str, Sequence[float]], memory: MemoryFigures) -> tuple[str, ...]:
    ratio = Spread.of(pair_ratios(seconds[key], seconds[BASELINE]))
    return (
        milliseconds(Spread.of(seconds[key]).median),
        f"{ratio.median:.2f} ({ratio.lower:.2f}–{ratio.upper:.2f})",
        mebibytes(memory.sent),
        mebibytes(memory.on_the_wire),
        mebibytes(memory.peak_gradients),
        mebibytes(memory.held_gradients),
        mebibytes(memory.peak_resident_in_steps),
    )


def _reading(
    seconds: Mapping[str, Mapping[str, Sequence[float]]], memory: Mapping[str, Mapping[str, MemoryFigures]]
) -> Iterator[str]:
    yield (
        "*No difference* is said where the interval holds 1. Peak resident memory is that of the warm trainer. Where "
        "figures depend on k, they stand in its order."
    )
    yield ""
    for comparison in COMPARISONS:
        chosen, otherwise = comparison.chosen, comparison.otherwise
        ratios = {k: Spread.of(pair_ratios(modes[chosen], modes[otherwise])) for k, modes in seconds.items()}
        pairs = [(modes[chosen], modes[otherwise]) for modes in memory.values()]
        yield (
            f"- **{comparison.what}**: step time {', '.join(_time(k, ratio) for k, ratio in ratios.items())}. "
            f"Bytes sent {_distinct(f'× {one.sent / other.sent:.3f}' for one, other in pairs)}. Gradient memory: peak "
            f"{_change(one.peak_gradients - other.peak_gradients for one, other in pairs)}, between steps "
            f"{_change(one.held_gradients - other.held_gradients for one, other in pairs)}. Peak resident memory "
            f"{_change(one.peak_resident_in_steps - other.peak_resident_in_steps for one, other in pairs)}."
        )


def _time(k: str, ratio: Spread) -> str:
    return f"× {ratio.median:.3f} at k = {k} ({verdict(ratio)}, {ratio.lower:.3f}–{ratio.upper:.3f})"


def _change(differences: Iterable[int]) -> str:
    return f"{_distinct(f'{difference / 2**20:+.1f}' for difference in differences)} MiB"


def _distinct(texts: Iterable[str]) -> str:
    """One figure for each k, or one for all when they are the same."""
    listed = list(texts)
    return listed[0] if len(set(listed)) == 1 else " / ".join(listed)
