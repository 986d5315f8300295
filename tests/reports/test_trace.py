"""A trace has every action where it ran, and the bytes of gradients as the program holds them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

from syncline.program.actions import AllocateGradients
from syncline.program.display.text import action_json, listing
from syncline.reports.timeline import TimelineFile, Timelines, read_timelines
from syncline.reports.trace import write_chrome_trace
from syncline.runtime.timing import ActionTime
from syncline.strategy import Strategy
from syncline.strategy.topology import Topology
from tests.program.examples import small_program

PROGRAM = small_program(Strategy(topology=Topology(pp=2), micro_batches=2, release_gradients=True))
BEGAN = {0: 100.0, 1: 100.25}


def milliseconds(count: int) -> float:
    return round(count * 1e-3, 9)


def timeline(rank: int) -> list[list[dict[str, Any]]]:
    """Every action takes a millisecond; two steps, the second one second after the first."""
    return [
        [
            {
                "step": step + 1,
                "began": BEGAN[rank] + step,
                "position": position,
                "start": milliseconds(position),
                "end": milliseconds(position + 1),
                **action_json(action),
            }
            for position, action in enumerate(PROGRAM.ranks[rank])
        ]
        for step in range(2)
    ]


def trace_of(timelines: Timelines) -> list[dict[str, Any]]:
    file = io.StringIO()
    write_chrome_trace(file, PROGRAM, timelines)
    events: list[dict[str, Any]] = json.loads(file.getvalue())["traceEvents"]
    return events


def held(events: Sequence[dict[str, Any]], rank: int) -> list[int]:
    return [event["args"]["bytes"] for event in events if event["ph"] == "C" and event["tid"] == rank]


def test_every_action_stands_where_it_ran(tmp_path):
    for rank in range(2):
        file = TimelineFile(tmp_path, rank, PROGRAM.ranks[rank])
        for step in range(2):
            places = range(len(PROGRAM.ranks[rank]))
            times = [ActionTime(place, milliseconds(place), milliseconds(place + 1)) for place in places]
            file.write(step + 1, BEGAN[rank] + step, times)
    assert {rank: list(steps) for rank, steps in read_timelines(tmp_path).items()} == {0: timeline(0), 1: timeline(1)}
    events = trace_of(read_timelines(tmp_path))
    for rank in range(2):
        lines = listing(PROGRAM, rank)
        found = [event for event in events if event["ph"] == "X" and event["tid"] == rank]
        assert [event["name"] for event in found] == 2 * lines
        assert {round(event["dur"]) for event in found} == {1000}
        offset = 250_000 * rank
        assert [round(event["ts"]) for event in found] == [
            offset + step * 1_000_000 + 1000 * place for step in range(2) for place in range(len(lines))
        ]
        (name,) = (e["args"]["name"] for e in events if e["name"] == "thread_name" and e["tid"] == rank)
        assert name == f"rank {rank}, stage {rank}"


def test_gradient_bytes_rise_to_the_declared_peak_and_fall_to_nothing():
    events = trace_of({rank: timeline(rank) for rank in range(2)})
    for rank in range(2):
        assert max(held(events, rank)) == PROGRAM.peak_gradient_bytes[rank]
        assert held(events, rank)[-1] == 0


def test_buckets_that_fill_in_another_order_count_from_when_they_are_allocated():
    """The last allocation of a rank comes before all else here."""
    steps = timeline(0)[:1]
    actions = PROGRAM.ranks[0]
    last = max(place for place, action in enumerate(actions) if isinstance(action, AllocateGradients))
    steps[0][last].update(start=-0.5, end=-0.4)
    action = actions[last]
    assert isinstance(action, AllocateGradients)
    size = PROGRAM.storage_bytes(0, action.bucket, action.part)
    assert held(trace_of({0: steps}), 0)[0] == size
    assert sorted(held(trace_of({0: steps}), 0))[-1] == PROGRAM.peak_gradient_bytes[0]


def test_without_timelines_there_is_an_empty_trace(tmp_path):
    assert trace_of(read_timelines(tmp_path)) == []
