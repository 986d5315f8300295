"""The timelines of all ranks as one trace that Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing) open.

Source of the format: Google, "Trace Event Format" (complete events `X`, counters `C`, metadata `M`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from syncline.program.actions import AllocateGradients, FreeGradients
from syncline.program.costs import gradient_bytes_between_steps
from syncline.program.program import Program
from syncline.program.text import listing, title
from syncline.reports.timeline import Entry

MICROSECONDS = 1e6


def chrome_trace(program: Program, timelines: Mapping[int, Iterable[Entry]]) -> dict[str, Any]:
    """One row for each rank with its actions, and beside it a line with the bytes of its gradients.

    Rows of ranks on different machines are as far apart as their clocks.
    """
    timelines = {rank: list(entries) for rank, entries in timelines.items()}
    first = min((entry["began"] for entries in timelines.values() for entry in entries), default=0.0)
    events = [event for rank in sorted(timelines) for event in _events(program, rank, timelines[rank], first)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(program: Program, rank: int, entries: Iterable[Entry], first: float) -> Iterator[dict[str, Any]]:
    row = {"pid": 0, "tid": rank}
    yield {"ph": "M", "name": "thread_name", **row, "args": {"name": title(program, rank)}}
    yield {"ph": "M", "name": "thread_sort_index", **row, "args": {"sort_index": rank}}
    lines, held = listing(program, rank), gradient_bytes_between_steps(program, rank)
    for entry in entries:
        action = program.ranks[rank][entry["position"]]
        at = (entry["began"] - first + entry["start"]) * MICROSECONDS
        yield {
            "ph": "X",
            "name": lines[entry["position"]],
            "cat": entry["action"],
            "ts": at,
            "dur": (entry["end"] - entry["start"]) * MICROSECONDS,
            **row,
            "args": {"step": entry["step"], "position": entry["position"]},
        }
        if isinstance(action, (AllocateGradients, FreeGradients)):
            size = program.storage_bytes(rank, action.bucket, action.part)
            held += size if isinstance(action, AllocateGradients) else -size
            yield {"ph": "C", "name": f"gradient bytes, rank {rank}", "ts": at, **row, "args": {"bytes": held}}
