"""How long a user waits: for `syncline --help`, and for the first training step on 2 local ranks.

python benchmarks/startup.py [--repetitions N] [--write docs/benchmarks.md]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from against_ddp import REFERENCE
from ranks import RANKS
from reporting import describe_machine, table, write_section

COMMAND = Path(sys.executable).with_name("syncline")
FIRST_STEP = re.compile(r"\bstep +1/")
END_SECONDS = 30
"""How long a run that was told to end may take."""


def main(words: list[str]) -> int:
    options = _options(words)
    with tempfile.TemporaryDirectory(prefix="syncline-benchmark-") as folder:
        section = report(measure(Path(folder), options.repetitions), options.repetitions)
    print(section)
    if options.write:
        write_section(options.write, "startup", section)
    return 0


def measure(folder: Path, repetitions: int) -> dict[str, list[float]]:
    """Seconds of every repetition, by what the user waits for."""
    reference = folder / "reference.json"
    reference.write_text(json.dumps(_reference_keys()))
    cache = folder / "cache"
    waits: dict[str, Callable[[], float]] = {
        "`python -c pass`, for comparison": lambda: _seconds([sys.executable, "-c", "pass"]),
        "`syncline --help`": lambda: _seconds([str(COMMAND), "--help"]),
        "`syncline train` to its first step: the reference job on random tokens": lambda: _first_step(
            folder, [str(reference)]
        ),
        "`syncline train` to its first step: the demonstration, nothing cached": lambda: _first_step(
            folder, ["--data_cache_folder", tempfile.mkdtemp(dir=folder)]
        ),
        "`syncline train` to its first step: the demonstration, text already tokenized": lambda: _first_step(
            folder, ["--data_cache_folder", str(cache)]
        ),
    }
    _first_step(folder, ["--data_cache_folder", str(cache)])
    return {what: [wait() for _ in range(repetitions)] for what, wait in waits.items()}


def report(seconds: dict[str, list[float]], repetitions: int) -> str:
    rows = []
    for what, each in seconds.items():
        rows.append((what, *(f"{value:.2f}" for value in (median(each), min(each), max(each)))))
    return "\n".join(
        [
            "## Starting",
            "",
            f"{describe_machine()}; {repetitions} repetitions, {RANKS} ranks.",
            "",
            *table(("seconds", "median", "least", "most"), rows),
            "",
            "The first step counts as done when its line is printed.",
        ]
    )


def _reference_keys() -> dict[str, object]:
    return {
        "model_config": dict(REFERENCE.model_config),
        "train_data": "random-tokens",
        "max_seq_length": REFERENCE.sequence,
        "per_device_train_batch_size": REFERENCE.rows,
        "nproc_per_node": RANKS,
        "max_steps": 10,
        "validation_split": 0,
    }


def _seconds(command: Sequence[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def _first_step(folder: Path, words: Sequence[str]) -> float:
    """Seconds from the command to its first step's line. The run is ended then."""
    output = tempfile.mkdtemp(dir=folder)
    command = [str(COMMAND), "train", *words, "--progress", "plain", "--logging_steps", "1", "--output_dir", output]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if FIRST_STEP.search(line):
                elapsed = time.perf_counter() - start
                process.terminate()
                process.communicate(timeout=END_SECONDS)
                return elapsed
    raise SystemExit(
        f"{' '.join(command)} ended with status {process.returncode} before its first step:\n{''.join(lines)}"
    )


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="how often each wait is measured (default: 5)")
    parser.add_argument("--write", type=Path, help="write the section into this page")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
