"""What timers cost: steps with and without `enable_timer` in turns, of replicas and of a pipeline, on 2 local ranks.

python benchmarks/timers.py [--repetitions N] [--write docs/benchmarks.md]

A timed step ends with its lines in the rank's timeline, as `syncline train` writes them.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradient_life import WORKLOAD
from measuring import time_in_turns
from ranks import RANKS, THREADS_PER_RANK, ask_ranks, is_rank, serve_rank
from reporting import Spread, describe_machine, milliseconds, option_parser, pair_ratios, table, verdict, write_section
from syncline.data.batch import MicroBatch
from syncline.reports.timeline import TimelineFile
from trainers import SynclineMode, SynclineTrainer, describe

SECTION = "timers"
ACCUMULATION = 8
REPETITIONS = 40
TIMER = "enable_timer"

FORMS: dict[str, Mapping[str, Any]] = {
    "2 replicas, reduced after every micro-batch": {"gradient_sync": "every_micro_batch"},
    "a pipeline of 2 ranks with 2 stages each, ZBV": {
        "pipeline_parallel_degree": 2,
        "pipeline_schedule_mode": "ZBV",
    },
}


class TimedTrainer(SynclineTrainer):
    """Writes what its timers have seen after every step."""

    def __init__(self, mode: SynclineMode, rank: int, folder: Path) -> None:
        super().__init__(mode, WORKLOAD, ACCUMULATION, rank, RANKS)
        self._timeline = TimelineFile(folder, rank, self.actions)
        self._steps = 0

    def step(self, micro_batches: Sequence[MicroBatch]) -> None:
        super().step(micro_batches)
        self._steps += 1
        timer = self.result.timer
        assert timer is not None
        self._timeline.write(self._steps, timer.began(), timer.times())


def main(words: list[str]) -> int:
    options = option_parser(__doc__, REPETITIONS).parse_args(words)
    section = report({form: ask_ranks(__file__, {"form": form, "time": options.repetitions}) for form in FORMS})
    print(section)
    if options.write:
        write_section(options.write, SECTION, section)
    return 0


def answer(request: Mapping[str, Any], rank: int) -> dict[str, list[float]]:
    """Seconds of the steps of one form, without timers and with them."""
    keys = FORMS[request["form"]]
    with tempfile.TemporaryDirectory() as folder:
        trainers = {
            "off": SynclineTrainer(SynclineMode("off", keys), WORKLOAD, ACCUMULATION, rank, RANKS),
            "on": TimedTrainer(SynclineMode("on", {**keys, "pipeline_parallel_config": TIMER}), rank, Path(folder)),
        }
        return time_in_turns(trainers, WORKLOAD.micro_batches(rank, ACCUMULATION), request["time"])


def report(seconds: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    rows = []
    for form, each in seconds.items():
        ratio = Spread.of(pair_ratios(each["on"], each["off"]))
        medians = (milliseconds(Spread.of(each[name]).median) for name in ("off", "on"))
        rows.append((form, *medians, f"{ratio.median:.4f} ({ratio.lower:.4f}–{ratio.upper:.4f}): {verdict(ratio)}"))
    count = len(next(iter(seconds.values()))["on"])
    return "\n".join(
        [
            "## Timers",
            "",
            f"{describe_machine()}; {count} repetitions.",
            "",
            f"Llama ({describe(WORKLOAD)}), k = {ACCUMULATION}, float32, {RANKS} Gloo ranks over loopback, "
            f"{THREADS_PER_RANK} thread each. A step with `{TIMER}` times every action and writes a line for it. Both "
            "trainers live in the same processes and take turns, in an order drawn anew for each repetition.",
            "",
            *table(("steps of", "without timers, ms", "with timers, ms", "with / without"), rows),
        ]
    )


if __name__ == "__main__":
    sys.exit(serve_rank(answer) if is_rank() else main(sys.argv[1:]))
