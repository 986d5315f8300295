"""A trace has every action where it ran, and the bytes of gradients as the program holds them."""

from __future__ import annotations

import json

from syncline.program.text import listing
from syncline.reports.timeline import TimelineFile, read_timelines
from syncline.reports.trace import chrome_trace
from syncline.runtime.clock import ActionTime
from syncline.strategy import Strategy
from syncline.topology import Topology
from tests.program.examples import small_program

PROGRAM = small_program(Strategy(topology=Topology(pp=2), micro_batches=2, release_gradients=True))
BEGAN = {0: 100.0, 1: 100.25}


def milliseconds(count: int) -> float:
    return round(count * 1e-3, 9)


def timeline(rank: int) -> list[dict]:
    """Every action takes a millisecond; two steps, the second one second after the first."""
    return [
        {
            "step": step + 1,
            "began": BEGAN[rank] + step,
            "position": position,
            "start": milliseconds(position),
            "end": milliseconds(position + 1),
            **action.to_json(),
        }
        for step in range(2)
        for position, action in enumerate(PROGRAM.ranks[rank])
    ]


def test_every_action_stands_where_it_ran(tmp_path):
    for rank in range(2):
        file = TimelineFile(tmp_path, rank, PROGRAM.ranks[rank])
        for step in range(2):
            places = range(len(PROGRAM.ranks[rank]))
            times = [ActionTime(place, milliseconds(place), milliseconds(place + 1)) for place in places]
            file.write(step + 1, BEGAN[rank] + step, times)
    assert read_timelines(tmp_path) == {rank: timeline(rank) for rank in range(2)}
    trace = json.loads(json.dumps(chrome_trace(PROGRAM, read_timelines(tmp_path))))
    for rank in range(2):
        lines = listing(PROGRAM, rank)
        found = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["tid"] == rank]
        assert [event["name"] for event in found] == 2 * lines
        assert {round(event["dur"]) for event in found} == {1000}
        offset = 250_000 * rank
        assert [round(event["ts"]) for event in found] == [
            offset + step * 1_000_000 + 1000 * place for step in range(2) for place in range(len(lines))
        ]
        (name,) = (e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name" and e["tid"] == rank)
        assert name == f"rank {rank}, stage {rank}"


def test_gradient_bytes_rise_to_the_declared_peak_and_fall_to_nothing():
    events = chrome_trace(PROGRAM, {rank: timeline(rank) for rank in range(2)})["traceEvents"]
    for rank in range(2):
        held = [event["args"]["bytes"] for event in events if event["ph"] == "C" and event["tid"] == rank]
        assert max(held) == PROGRAM.peak_gradient_bytes[rank]
        assert held[-1] == 0


def test_without_timelines_there_is_an_empty_trace(tmp_path):
    assert chrome_trace(PROGRAM, read_timelines(tmp_path))["traceEvents"] == []
