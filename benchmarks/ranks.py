"""A benchmark's ranks: the script starts itself again as processes on this machine, and gets their answer back.

if __name__ == "__main__":
    sys.exit(serve_rank(body) if is_rank() else main(sys.argv[1:]))
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from syncline.launch import launch
from syncline.rank import join, leave, rank_environment, run_rank

RANKS = 2
THREADS_PER_RANK = 1
CONDITIONS = f"float32, fused AdamW, {RANKS} Gloo ranks over loopback, {THREADS_PER_RANK} thread each"

Body = Callable[[Mapping[str, Any], int], Any]
"""(request, rank) -> the answer; both are plain JSON. Only the answer of rank 0 is kept."""


def ask_ranks(script: str, request: Mapping[str, Any], ranks: int = RANKS) -> Any:
    """Run `script` as so many Gloo ranks with one thread each, and return what rank 0 answers to `request`.

    Ends the benchmark when a rank fails.
    """
    with tempfile.TemporaryDirectory(prefix="syncline-benchmark-") as folder:
        _request(folder).write_text(json.dumps(request))
        status = launch([script, folder], ranks, threads_per_rank=THREADS_PER_RANK)
        if status:
            sys.exit(status)
        return json.loads(_answer(folder).read_text())


def is_rank() -> bool:
    """Whether `ask_ranks` has started this process."""
    return rank_environment() is not None


def serve_rank(body: Body) -> int:
    """Answer the request that this process was started for; an exit status."""
    environment = rank_environment()
    assert environment is not None
    folder = sys.argv[1]

    def work() -> int:
        join(environment, "cpu")
        answer = body(json.loads(_request(folder).read_text()), environment.rank)
        if environment.rank == 0:
            _answer(folder).write_text(json.dumps(answer))
        leave()
        return 0

    return run_rank(environment, work)


def _request(folder: str) -> Path:
    return Path(folder, "request.json")


def _answer(folder: str) -> Path:
    return Path(folder, "answer.json")
