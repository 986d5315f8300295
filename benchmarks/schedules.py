"""Pipeline schedules on 4 local ranks beside what the simulation says of them; computations sleep.

python benchmarks/schedules.py [--repetitions N] [--json] [--write docs/benchmarks.md]

A stage's forward, and each half of its backward, sleeps for its share of a rank's time.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ranks import ask_ranks, is_rank, serve_rank
from reporting import Spread, describe_machine, milliseconds, option_parser, pair_ratios, table, write_section
from sleeping import Sleeper, micro_batches, sleeping_program, start_sleeping_workers
from syncline.program.analysis.costs import simulated_time
from syncline.program.program import Program
from syncline.strategy import Strategy
from syncline.strategy.topology import Topology

POSITIONS = 4
MICRO_BATCHES = 8
COMPUTATION = 0.090
"""Seconds of a forward through all layers of a rank, and of each half of a backward.

A simulation has no messages. On two cores a computation and its two messages cost the host about 1.5 ms beside the
sleep (of which the late end of a sleep is a tenth): 5 % of a forward through the third of a rank that takes 30 ms.
"""
WARM_UP_STEPS = 1
REPETITIONS = 10


@dataclass(frozen=True)
class Form:
    """A schedule with so many stages on each rank."""

    schedule: str
    stages: int = 1
    limit: float | None = None
    """Of how many micro-batches a rank may hold the activations, where the schedule asks."""

    @property
    def title(self) -> str:
        stages = "" if self.stages == 1 else f", {self.stages} stages a rank"
        limit = "" if self.limit is None else f", {self.limit:g} micro-batches held"
        return self.schedule + stages + limit

    def program(self) -> Program:
        strategy = Strategy(
            topology=Topology(pp=POSITIONS),
            schedule=self.schedule,
            virtual_stages=self.stages,
            activation_limit=self.limit,
            micro_batches=MICRO_BATCHES,
        )
        return sleeping_program(strategy)

    def predicted(self) -> float:
        """Seconds of a step."""
        return simulated_time(self.program()) * COMPUTATION / self.stages


FORMS = (
    Form("1F1B"),
    Form("FThenB"),
    Form("VPP", 2),
    Form("VPP", 3),
    Form("ZBH1"),
    Form("ZBH1", 2),
    Form("ZBV", 2),
    Form("DualPipeV", 2),
    Form("Bounded", limit=2),
    Form("BoundedV", 2, limit=2),
)
REFERENCE = FORMS[0]


def work(request: Mapping[str, Any], rank: int) -> list[list[float]]:
    """The seconds of every step of every form, in turns, each on the slowest rank."""
    workers = start_sleeping_workers([Sleeper(form.program(), COMPUTATION / form.stages) for form in FORMS], rank)
    batch = micro_batches(MICRO_BATCHES)
    order = random.Random(0)
    seconds: list[list[float]] = [[] for _ in FORMS]
    for turn in range(WARM_UP_STEPS + request["repetitions"]):
        for index in order.sample(range(len(FORMS)), len(FORMS)):
            dist.barrier()
            began = time.perf_counter()
            workers[index].step(batch, 0.0)
            took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn >= WARM_UP_STEPS:
                seconds[index].append(float(took))
    return seconds


def rows(seconds: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """A row for every form, as plain JSON."""
    reference = seconds[FORMS.index(REFERENCE)]
    return [
        {
            "schedule": form.schedule,
            "virtual_stages": form.stages,
            "activation_limit": form.limit,
            "predicted_seconds": form.predicted(),
            "step_seconds": median(each),
            "predicted_ratio": form.predicted() / REFERENCE.predicted(),
            "ratio": median(pair_ratios(each, reference)),
            "seconds": list(each),
        }
        for form, each in zip(FORMS, seconds, strict=True)
    ]


def report(measured: Sequence[Mapping[str, Any]]) -> str:
    reference = next(iter(measured))["seconds"]
    lines = []
    for form, row in zip(FORMS, measured, strict=True):
        ratio = Spread.of(pair_ratios(row["seconds"], reference))
        lines.append(
            (
                form.title,
                milliseconds(row["predicted_seconds"]),
                milliseconds(row["step_seconds"]),
                f"{row['step_seconds'] / row['predicted_seconds']:.3f}",
                f"{row['predicted_ratio']:.3f}",
                f"{ratio.median:.3f} ({ratio.lower:.3f}–{ratio.upper:.3f})",
            )
        )
    head = (
        "schedule",
        "simulated, ms",
        "measured, ms",
        "measured / simulated",
        "to 1F1B, simulated",
        "to 1F1B, measured",
    )
    return "\n".join(
        [
            "## Schedules",
            "",
            f"{describe_machine()}; {len(reference)} repetitions.",
            "",
            f"{POSITIONS} Gloo ranks in one pipeline, {MICRO_BATCHES} micro-batches. A forward through the layers of a "
            f"rank, and each half of a backward, sleeps {milliseconds(COMPUTATION)} ms; all else is a training step's. "
            "All schedules live in the same processes and take turns, in an order drawn anew for each repetition.",
            "",
            *table(head, lines),
        ]
    )


def main(words: list[str]) -> int:
    options = _options(words)
    measured = rows(ask_ranks(__file__, {"repetitions": options.repetitions}, POSITIONS))
    print(json.dumps(measured, indent=1) if options.json else report(measured))
    if options.write:
        write_section(options.write, "schedules", report(measured))
    return 0


def _options(words: list[str]) -> argparse.Namespace:
    parser = option_parser(__doc__, REPETITIONS)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, and nothing else")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(serve_rank(work) if is_rank() else main(sys.argv[1:]))
