"""How much of the reduction of gradients hides behind a pipeline's cool-down, on a link with a rate.

python benchmarks/cool_down.py [--link LINK] [--repetitions N] [--json] [--write docs/benchmarks.md]

Computations sleep. Two replicas of a pipeline of 2 ranks are at the two ends of the link: what stages send each other
stays at one end, and gradients cross it. Needs root for network namespaces; elsewhere it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from link import LinkUnavailable, open_link
from ranks import ask_ranks_across, is_rank, serve_rank
from reporting import describe_machine, milliseconds, option_parser, table, write_section
from sleeping import Sleeper, micro_batches, sleeping_program, start_sleeping_workers
from syncline.program.actions import ADDING_GRADIENTS, COMPUTATIONS, Action
from syncline.program.analysis.costs import simulated
from syncline.program.analysis.simulation import length
from syncline.program.program import Program
from syncline.strategy import Strategy, SyncMoment
from syncline.strategy.topology import Topology

SECTION = "cool_down"
POSITIONS, REPLICAS = 2, 2
MICRO_BATCHES = 4
LAYERS = 8
"""On a rank, each a bucket."""
ELEMENTS = 2**18
"""Of a layer, float32."""
COMPUTATION = 0.200
"""Seconds of a forward through all layers of a rank, and of each half of a backward."""
RATES_IN_BYTES = {"1gbit": 1e9 / 8, "300mbit": 3e8 / 8}
"""A second."""
FRAMING = 1.04
"""Bytes on the wire over bytes of gradients: headers of Ethernet, IP and TCP."""
WARM_UP_STEPS = 1
REPETITIONS = 10


@dataclass(frozen=True)
class Form:
    """When reductions start, and under which schedule."""

    title: str
    schedule: str
    overlap: bool
    stages: int = 1

    def program(self) -> Program:
        return sleeping_program(
            Strategy(
                topology=Topology(pp=POSITIONS, dp=REPLICAS, order="sharding_first"),
                schedule=self.schedule,
                virtual_stages=self.stages,
                micro_batches=MICRO_BATCHES,
                sync=SyncMoment.LAST_MICRO_BATCH if self.overlap else SyncMoment.AFTER_ACCUMULATION,
                overlap=self.overlap,
            ),
            LAYERS // self.stages,
            ELEMENTS,
        )


FORMS = (
    Form("1F1B, after accumulation", "1F1B", overlap=False),
    Form("1F1B, overlapped", "1F1B", overlap=True),
    Form("ZBH1, overlapped", "ZBH1", overlap=True),
    Form("ZBV, overlapped", "ZBV", overlap=True, stages=2),
)


def predicted(form: Form, bytes_per_second: float) -> tuple[float, float]:
    """Seconds of a step, and how many of them come behind the last computation.

    Computations are where the simulation has them. Each bucket is ready when its layer's last gradient is added, or,
    after accumulation, when its rank has computed everything. All cross the link one after the other: each rank of
    either replica sends as many bytes as a bucket has.
    """
    program = form.program()
    scale = COMPUTATION / form.stages
    moments = simulated(program)
    computed = length(moments) * scale
    crossing = ELEMENTS * 4 * FRAMING / bytes_per_second
    now = 0.0
    for ready in sorted(_ready_times(form, moments, scale)):
        now = max(now, ready) + crossing
    return max(now, computed), max(0.0, now - computed)


def _ready_times(form: Form, moments: Sequence[Sequence[Any]], scale: float) -> Iterator[float]:
    layers = LAYERS // form.stages
    for own in moments:
        if not form.overlap:
            yield from [own[-1].end * scale] * LAYERS
            continue
        last = {moment.computation.stage: moment for moment in own if isinstance(moment.computation, ADDING_GRADIENTS)}
        for moment in last.values():
            begin, end = moment.begin * scale, moment.end * scale
            yield from (begin + (layer + 1) * (end - begin) / layers for layer in range(layers))


def work(request: Mapping[str, Any], rank: int) -> list[dict[str, list[float]]]:
    """Of every step of every form, in turns: its seconds, and those that come behind the last computation of all ranks,
    whose clocks are one.
    """
    sleepers = [Sleeper(form.program(), COMPUTATION / form.stages, LAYERS // form.stages, ELEMENTS) for form in FORMS]
    workers = start_sleeping_workers(sleepers, rank)
    batch = micro_batches(MICRO_BATCHES)
    order = random.Random(0)
    found: list[dict[str, list[float]]] = [{"step": [], "exposed": []} for _ in FORMS]
    computed = 0.0

    def after(action: Action) -> None:
        nonlocal computed
        if isinstance(action, COMPUTATIONS):
            computed = time.perf_counter()

    for turn in range(WARM_UP_STEPS + request["repetitions"]):
        for index in order.sample(range(len(FORMS)), len(FORMS)):
            dist.barrier()
            began = time.perf_counter()
            workers[index].step(batch, 0.0, after)
            moments = torch.tensor([-began, computed, time.perf_counter()], dtype=torch.float64)
            dist.all_reduce(moments, dist.ReduceOp.MAX)
            first, last_computed, end = moments.tolist()
            if turn >= WARM_UP_STEPS:
                found[index]["step"].append(end + first)
                found[index]["exposed"].append(end - last_computed)
    return found


def rows(link: str, found: Sequence[Mapping[str, Sequence[float]]]) -> list[dict[str, Any]]:
    """A row for every form, as plain JSON."""
    return [
        {
            "form": form.title,
            "link": link,
            "predicted_seconds": predicted(form, RATES_IN_BYTES[link])[0],
            "step_seconds": median(each["step"]),
            "predicted_exposed_seconds": predicted(form, RATES_IN_BYTES[link])[1],
            "exposed_seconds": median(each["exposed"]),
            "repetitions": len(each["step"]),
        }
        for form, each in zip(FORMS, found, strict=True)
    ]


def report(measured: Sequence[Mapping[str, Any]]) -> str:
    first = measured[0]
    lines = [
        (
            row["form"],
            *(
                milliseconds(row[name])
                for name in ("predicted_exposed_seconds", "exposed_seconds", "predicted_seconds", "step_seconds")
            ),
            f"{row['step_seconds'] / row['predicted_seconds']:.3f}",
        )
        for row in measured
    ]
    head = ("form", "exposed, predicted, ms", "exposed, ms", "step, predicted, ms", "step, ms", "step / predicted")
    payload = POSITIONS * LAYERS * ELEMENTS * 4 / 2**20
    return "\n".join(
        [
            "## Reductions behind the cool-down",
            "",
            f"{describe_machine()}; {first['repetitions']} repetitions.",
            "",
            f"{REPLICAS} replicas of a pipeline of {POSITIONS} ranks, one at each end of a link of {first['link']}, "
            f"over which each sends {payload:.0f} MiB of gradients in a step. k = {MICRO_BATCHES}, {LAYERS} layers on "
            f"each rank, each a bucket; a forward through them, and each half of a backward, sleeps "
            f"{milliseconds(COMPUTATION)} ms, all else is a training step's. *Exposed* is what comes behind the last "
            "computation of all ranks. All forms live in the same processes and take turns, in an order drawn anew for "
            "each repetition.",
            "",
            *table(head, lines),
        ]
    )


def main(words: list[str]) -> int:
    options = _options(words)
    try:
        with open_link(options.link) as link:
            found = ask_ranks_across(link, __file__, {"repetitions": options.repetitions}, POSITIONS * REPLICAS)
    except LinkUnavailable as reason:
        print(f"{options.link}: skipped: {reason}", file=sys.stderr)
        return 0
    measured = rows(options.link, found)
    print(json.dumps(measured, indent=1) if options.json else report(measured))
    if options.write:
        write_section(options.write, SECTION, report(measured))
    return 0


def _options(words: list[str]) -> argparse.Namespace:
    parser = option_parser(__doc__, REPETITIONS)
    parser.add_argument("--link", choices=RATES_IN_BYTES, default="300mbit", help="the rate (default: 300mbit)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, and nothing else")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(serve_rank(work) if is_rank() else main(sys.argv[1:]))
