"""What the options of a gradient's life buy and cost on 2 local ranks, beside torch DDP with and without `no_sync`.

python benchmarks/gradient_life.py [--repetitions N] [--quick] [--write docs/benchmarks.md]

The raw figures go to benchmarks/results/gradient_life.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradient_life_report import report
from measuring import measure_memory, time_in_turns
from ranks import RANKS, ask_ranks, is_rank, serve_rank
from reporting import describe_machine, repetitions, write_section
from trainers import DdpMode, Mode, SynclineMode, Workload, start_trainer

RESULTS = Path(__file__).parent / "results" / "gradient_life.json"
ACCUMULATIONS = (1, 4, 16)
QUICK_ACCUMULATIONS = (1, 4)
REPETITIONS, QUICK_REPETITIONS = 20, 6

WORKLOAD = Workload(
    model_config={
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 4096,
        "intermediate_size": 688,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    },
    rows=1,
    sequence=128,
    bucket_mebibytes=4,
)
"""5.3 million parameters, and little compute between reductions, as on a network that is slow for its processors."""

EVERY, AFTER = {"gradient_sync": "every_micro_batch"}, "gradient_sync_after_accumulate"
AVERAGE = "enable_allreduce_avg_in_gradient_scale"
RELEASE = {"sharding_parallel_config": "enable_release_grads"}

MODES: dict[str, Mode] = {
    "every": SynclineMode("Syncline, every micro-batch", EVERY),
    "every_average": SynclineMode("Syncline, every micro-batch, average", {**EVERY, "data_parallel_config": AVERAGE}),
    "last": SynclineMode("Syncline, last micro-batch, overlapped (default)", {}),
    "last_release": SynclineMode("Syncline, last micro-batch, overlapped, release", RELEASE),
    "after": SynclineMode("Syncline, after accumulation", {"data_parallel_config": AFTER}),
    "after_average": SynclineMode(
        "Syncline, after accumulation, average", {"data_parallel_config": f"{AFTER} {AVERAGE}"}
    ),
    "after_release": SynclineMode("Syncline, after accumulation, release", {"data_parallel_config": AFTER, **RELEASE}),
    "ddp_every": DdpMode("DDP, every micro-batch", no_sync=False, bucket_view=False),
    "ddp_no_sync": DdpMode("DDP, `no_sync`", no_sync=True, bucket_view=False),
    "ddp_bucket_view": DdpMode("DDP, `no_sync`, `gradient_as_bucket_view`", no_sync=True, bucket_view=True),
}


def main(words: list[str]) -> int:
    options = _options(words)
    accumulations = QUICK_ACCUMULATIONS if options.quick else ACCUMULATIONS
    count = options.repetitions or (QUICK_REPETITIONS if options.quick else REPETITIONS)
    figures = measure(accumulations, count)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    section = report(figures)
    print(section)
    if options.write:
        write_section(options.write, "gradient_life", section)
    return 0


def measure(accumulations: tuple[int, ...], count: int) -> dict[str, Any]:
    """All raw figures, as plain JSON: `seconds` and `memory` by k, then by mode."""
    return {
        "machine": describe_machine(),
        "repetitions": count,
        "workload": asdict(WORKLOAD),
        "modes": {key: mode.name for key, mode in MODES.items()},
        "seconds": {k: ask_ranks(__file__, {"accumulation": k, "time": count}) for k in map(str, accumulations)},
        "memory": {
            k: {key: ask_ranks(__file__, {"accumulation": k, "memory": key}) for key in MODES}
            for k in map(str, accumulations)
        },
    }


def answer(request: Mapping[str, Any], rank: int) -> Any:
    """What a rank measures: the time of all modes in turns, or the memory of one."""
    accumulation = int(request["accumulation"])
    micro_batches = WORKLOAD.micro_batches(rank, accumulation)
    if "time" in request:
        trainers = {key: start_trainer(mode, WORKLOAD, accumulation, rank, RANKS) for key, mode in MODES.items()}
        return time_in_turns(trainers, micro_batches, request["time"])
    trainer = start_trainer(MODES[request["memory"]], WORKLOAD, accumulation, rank, RANKS)
    return asdict(measure_memory(trainer, micro_batches))


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--repetitions", type=repetitions, help=f"how often each mode is timed (default: {REPETITIONS})"
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_REPETITIONS} repetitions, k in {QUICK_ACCUMULATIONS}"
    )
    parser.add_argument("--write", type=Path, help="write the section into this page")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(serve_rank(answer) if is_rank() else main(sys.argv[1:]))
