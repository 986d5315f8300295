"""The reference job on 2 local ranks: Syncline with its default options beside torch DDP with `no_sync`.

python benchmarks/against_ddp.py [--pairs N] [--json FILE] [--write docs/benchmarks.md]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measuring import MemoryFigures, measure_memory, time_in_turns
from ranks import CONDITIONS, RANKS, ask_ranks, is_rank, serve_rank
from reporting import (
    CONFIDENCE,
    Spread,
    describe_machine,
    mebibytes,
    milliseconds,
    pair_ratios,
    repetitions,
    table,
    write_section,
)
from trainers import DdpMode, Mode, SynclineMode, Workload, describe, start_trainer

ACCUMULATION = 8
REFERENCE = Workload(
    model_config={
        "model_type": "llama",
        "hidden_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 8192,
        "intermediate_size": 1280,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    },
    rows=2,
    sequence=256,
    bucket_mebibytes=25,
)
"""26.5 million parameters."""

DEFAULT = SynclineMode("Syncline", {})
RELEASED = SynclineMode("Syncline, `enable_release_grads`", {"sharding_parallel_config": "enable_release_grads"})
NO_SYNC = DdpMode("DDP, `no_sync`", no_sync=True, bucket_view=False)
BUCKET_VIEW = DdpMode("DDP, `no_sync`, `gradient_as_bucket_view`", no_sync=True, bucket_view=True)
TIMED = (DEFAULT, NO_SYNC)
MODES: dict[str, Mode] = {mode.name: mode for mode in (DEFAULT, RELEASED, NO_SYNC, BUCKET_VIEW)}


def main(words: list[str]) -> int:
    options = _options(words)
    figures = measure(options.pairs)
    section = report(figures)
    print(section)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    if options.write:
        write_section(options.write, "against_ddp", section)
    return 0


def measure(pairs: int) -> dict[str, Any]:
    """All raw figures, as plain JSON."""
    return {
        "machine": describe_machine(),
        "pairs": pairs,
        "seconds": ask_ranks(__file__, {"time": pairs}),
        "memory": {name: ask_ranks(__file__, {"memory": name}) for name in MODES},
    }


def answer(request: Mapping[str, Any], rank: int) -> Any:
    """What a rank measures."""
    micro_batches = REFERENCE.micro_batches(rank, ACCUMULATION)
    if "time" in request:
        trainers = {mode.name: start_trainer(mode, REFERENCE, ACCUMULATION, rank, RANKS) for mode in TIMED}
        return time_in_turns(trainers, micro_batches, request["time"])
    trainer = start_trainer(MODES[request["memory"]], REFERENCE, ACCUMULATION, rank, RANKS)
    return asdict(measure_memory(trainer, micro_batches))


def report(figures: Mapping[str, Any]) -> str:
    """The figures as a section of Markdown; every sentence about them follows from them."""
    seconds = figures["seconds"]
    memory = {name: MemoryFigures(**each) for name, each in figures["memory"].items()}
    ratio = Spread.of(pair_ratios(seconds[DEFAULT.name], seconds[NO_SYNC.name]))
    return "\n".join(
        [
            "## The reference job beside torch DDP",
            "",
            f"{figures['machine']}; {figures['pairs']} pairs of steps.",
            "",
            f"Llama of 26.5M parameters ({describe(REFERENCE)}), k = {ACCUMULATION}, {CONDITIONS}. Both trainers live "
            "in the same processes and take turns; a ratio compares two steps of the same turn. Memory is that of the "
            "larger rank, each trainer alone in processes of its own.",
            "",
            *table(
                (
                    "MiB, but for the step",
                    "step, ms",
                    "peak resident",
                    "while training",
                    "peak gradients",
                    "between steps",
                ),
                [(name, _step(seconds.get(name)), *_memory(memory[name])) for name in MODES],
            ),
            "",
            f"**Step time, {DEFAULT.name} / {NO_SYNC.name}: {ratio.median:.3f}** (median of pairs; with a confidence "
            f"of {CONFIDENCE:.0%} the true one lies between {ratio.lower:.3f} and {ratio.upper:.3f}).",
            f"Peak resident memory, {DEFAULT.name} / {NO_SYNC.name}: "
            f"{memory[DEFAULT.name].peak_resident / memory[NO_SYNC.name].peak_resident:.3f}.",
        ]
    )


def _step(seconds: list[float] | None) -> str:
    return milliseconds(Spread.of(seconds).median) if seconds else "–"


def _memory(figures: MemoryFigures) -> tuple[str, ...]:
    columns = (
        figures.peak_resident,
        figures.peak_resident_in_steps,
        figures.peak_gradients,
        figures.held_gradients,
    )
    return tuple(map(mebibytes, columns))


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=repetitions, default=15, help="how many pairs of steps are timed (default: 15)")
    parser.add_argument("--json", type=Path, help="write the raw figures to this file")
    parser.add_argument("--write", type=Path, help="write the section into this page")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(serve_rank(answer) if is_rank() else main(sys.argv[1:]))
