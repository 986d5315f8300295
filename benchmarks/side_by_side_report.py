"""The rows of `side_by_side.py` as a section of Markdown. Every sentence about them is computed from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from against_ddp import ACCUMULATION, REFERENCE
from link import LOOPBACK
from peers.catalogue import PEERS, REFERENCE_PEER
from peers.environment import library_versions
from ranks import RANKS, THREADS_PER_RANK
from reporting import CONFIDENCE, LEAST_REPETITIONS, Spread, describe_machine, mebibytes, pair_ratios, table, verdict
from trainers import describe

Row = Mapping[str, Any]
Rows = Mapping[str, Mapping[str, Row]]
"""By link, then by peer."""

TITLES = {LOOPBACK: "loopback", "1gbit": "1 Gbit/s", "300mbit": "300 Mbit/s"}
PLAIN, CHOSEN = "syncline", "syncline-stage1-slice"
STAGE_1_PEERS = ("ddp-zero-redundancy", "deepspeed-zero1")
RELEASED = [name for name in PEERS if name.endswith("-release")]


@dataclass(frozen=True)
class Comparison:
    """Some figures over others."""

    what: str
    figures: Sequence[str]
    """In words; empty where one of the two was not measured."""


def report(rows: Iterable[Row]) -> str:
    """`rows` is what `side_by_side.measure` returns, and not empty."""
    by_link: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_link.setdefault(row["link"], {})[row["peer"]] = row
    return "\n".join([*_introduction(by_link), *_table(by_link), *_reading(by_link)])


def _introduction(rows: Rows) -> Iterator[str]:
    measured = next(row for each in rows.values() for row in each.values())
    yield "## Side by side"
    yield ""
    repetitions = _repetitions(len(measured["seconds"]))
    yield f"{describe_machine()}, {library_versions()}; {repetitions}."
    yield ""
    yield (
        f"Llama of 26.5M parameters ({describe(REFERENCE)}), k = {ACCUMULATION}, float32, fused AdamW, {RANKS} Gloo "
        f"ranks, {THREADS_PER_RANK} thread each; every peer starts from the same weights and trains on the same "
        "samples. Each peer has processes of its own; Syncline's keep freed memory for their next tensors, as ranks of "
        "`syncline train` do. In every repetition each peer takes its turn, in an order drawn anew, while all others "
        "wait; a turn is two steps in a row, of which the second is timed. Behind a step's seconds stands their ratio "
        f"to those of the same repetition's step of {PEERS[REFERENCE_PEER].title}. *Sent* is per step, by both ranks "
        "together, as the kernel counts it. Memory is measured apart, on the larger rank, each peer alone and set so "
        "that glibc returns every freed block from 64 KiB on: what is resident and no page of a file, less what it was "
        "once everything was imported and had run once on a tiny model. *Loss* is that of the fourth step. Links with "
        "a rate are pairs of virtual interfaces between two network namespaces, held to the rate in each direction."
    )
    yield ""


def _repetitions(count: int) -> str:
    return f"{count} repetition" + ("s" if count > 1 else "")


def _table(rows: Rows) -> list[str]:
    head = (
        "peer",
        *(f"{TITLES[link]}, s" for link in rows),
        "sent, MiB",
        "peak, MiB",
        "between steps, MiB",
        "loss",
    )
    names = [name for name in PEERS if any(name in each for each in rows.values())]
    return table(head, [(PEERS[name].title, *_cells(name, rows)) for name in names])


def _cells(name: str, rows: Rows) -> Iterator[str]:
    for each in rows.values():
        yield _seconds(each[name]) if name in each else "–"
    row = next(each[name] for each in rows.values() if name in each)
    yield from (mebibytes(row[figure]) for figure in ("bytes_sent", "peak_bytes", "held_bytes"))
    yield f"{row['loss']:.4f}"


def _seconds(row: Row) -> str:
    ratio = row["ratio_to_ddp"]
    return f"{row['step_seconds']:.2f}" + (f" (× {ratio:.3f})" if ratio is not None else "")


def _reading(rows: Rows) -> Iterator[str]:
    comparisons = [each for each in (*_times(rows), *_bytes(next(iter(rows.values())))) if each.figures]
    if not comparisons:
        return
    yield from ("", "### Reading", "")
    yield (
        "*No difference* is said where the interval, which holds the true median with a confidence of "
        f"{CONFIDENCE:.0%}, holds 1."
    )
    yield ""
    for comparison in comparisons:
        yield f"- **{comparison.what}**: {'; '.join(comparison.figures)}."


def _times(rows: Rows) -> Iterator[Comparison]:
    peers = [name for name, form in PEERS.items() if not form.is_own]
    sharded = [name for name in peers if PEERS[name].sharded]
    chosen, reference = f"Step time, {PEERS[CHOSEN].title} /", PEERS[REFERENCE_PEER].title
    yield Comparison(f"{chosen} the fastest peer", _against(rows, CHOSEN, peers))
    yield Comparison(f"{chosen} {reference}", _against(rows, CHOSEN, [REFERENCE_PEER]))
    yield Comparison(f"{chosen} the fastest sharded peer", _against(rows, CHOSEN, sharded))
    yield Comparison(f"Step time, {PEERS[PLAIN].title} / {reference}", _against(rows, PLAIN, [REFERENCE_PEER]))


def _against(rows: Rows, chosen: str, others: Sequence[str]) -> list[str]:
    """The times of `chosen` against those of the fastest of `others`, link by link."""
    texts = []
    for link, measured in rows.items():
        there = [name for name in others if name in measured]
        if chosen in measured and there:
            fastest = min(there, key=lambda name: measured[name]["step_seconds"])
            ratios = pair_ratios(measured[chosen]["seconds"], measured[fastest]["seconds"])
            named = f" of {PEERS[fastest].title}" if len(others) > 1 else ""
            texts.append(f"{TITLES[link]} {_ratio(ratios)}{named}")
    return texts


def _ratio(ratios: Sequence[float]) -> str:
    if len(ratios) < LEAST_REPETITIONS:
        return f"× {median(ratios):.3f}"
    spread = Spread.of(ratios)
    return f"× {spread.median:.3f} ({verdict(spread)}, {spread.lower:.3f}–{spread.upper:.3f})"


def _bytes(measured: Mapping[str, Row]) -> Iterator[Comparison]:
    stage_1 = [name for name in STAGE_1_PEERS if name in measured]
    for figure, what in (("held_bytes", "Held between steps"), ("peak_bytes", "Peak")):
        leanest = min(stage_1, key=lambda name: measured[name][figure], default=STAGE_1_PEERS[0])
        yield _quotients(measured, figure, f"{what}, released", RELEASED, leanest)
    yield _quotients(measured, "peak_bytes", "Peak", [PLAIN], REFERENCE_PEER)
    for deferred in ("fsdp2-deferred", "fsdp2-deferred-no-reshard"):
        yield _quotients(measured, "bytes_sent", "Sent", ["syncline-stage2", "syncline-stage3"], deferred)
    yield _quotients(measured, "peak_bytes", "Peak", ["syncline-stage3"], "fsdp2-deferred")
    yield _quotients(measured, "peak_bytes", "Peak", ["syncline-stage3-every"], "fsdp2")


def _quotients(measured: Mapping[str, Row], figure: str, what: str, chosen: Sequence[str], other: str) -> Comparison:
    there = [name for name in chosen if name in measured and other in measured]
    quotients = [f"{PEERS[name].title} × {measured[name][figure] / measured[other][figure]:.3f}" for name in there]
    return Comparison(f"{what} / {PEERS[other].title}", quotients)
