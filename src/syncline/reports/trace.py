"""The timelines of all ranks as one trace that Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing) open.

Source of the format: Google, "Trace Event Format" (complete events `X`, counters `C`, metadata `M`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, TextIO

from syncline.program.analysis.costs import gradient_bytes_added, gradient_bytes_between_steps
from syncline.program.display.text import listing, title
from syncline.program.program import Program
from syncline.reports.timeline import Entry, Timelines

MICROSECONDS = 1e6


def write_chrome_trace(file: TextIO, program: Program, timelines: Timelines) -> None:
    """One row for each rank with its actions, and beside it a line with the bytes of its gradients. Step after step is
    read and written.

    Rows of ranks on different machines are as far apart as their clocks.
    """
    steps = {rank: iter(each) for rank, each in timelines.items()}
    firsts = {rank: next(each, []) for rank, each in steps.items()}
    began = min((entries[0]["began"] for entries in firsts.values() if entries), default=0.0)
    file.write('{"displayTimeUnit": "ms", "traceEvents": [')
    separator = ""
    for rank in sorted(steps):
        for event in _events(program, rank, chain([firsts[rank]], steps[rank]), began):
            file.write(f"{separator}\n{json.dumps(event)}")
            separator = ","
    file.write("\n]}\n")


def _events(program: Program, rank: int, steps: Iterator[Sequence[Entry]], first: float) -> Iterator[dict[str, Any]]:
    row = {"pid": 0, "tid": rank}
    yield {"ph": "M", "name": "thread_name", **row, "args": {"name": title(program, rank)}}
    yield {"ph": "M", "name": "thread_sort_index", **row, "args": {"sort_index": rank}}
    lines, held = listing(program, rank), gradient_bytes_between_steps(program, rank)
    for entries in steps:
        # In the order of time: what happens inside a computation may happen in another order than it stands.
        for entry in sorted(entries, key=lambda entry: (entry["start"], entry["position"])):
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
            if added := gradient_bytes_added(program, rank, action):
                held += added
                yield {"ph": "C", "name": f"gradient bytes, rank {rank}", "ts": at, **row, "args": {"bytes": held}}
