"""A benchmark's ranks: the script starts itself again as processes on this machine, and gets their answer back.

if __name__ == "__main__":
    sys.exit(serve_rank(body) if is_rank() else main(sys.argv[1:]))
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from link import Link
from syncline.distributed.launch import launch
from syncline.distributed.rank import join, leave, rank_environment, run_rank

RANKS = 2
THREADS_PER_RANK = 1
PORT = "29531"
"""Where ranks meet across a link."""
POLL_SECONDS = 0.2
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


def ask_ranks_across(link: Link, script: str, request: Mapping[str, Any], ranks: int) -> Any:
    """The same, where the first half of the ranks is at one end of `link` and the other half at the other end."""
    with tempfile.TemporaryDirectory(prefix="syncline-benchmark-") as folder:
        _request(folder).write_text(json.dumps(request))
        processes = [
            subprocess.Popen(
                [*link.within(rank * 2 // ranks), sys.executable, script, folder],
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": link.address,
                    "MASTER_PORT": PORT,
                    "GLOO_SOCKET_IFNAME": link.interface,
                    "OMP_NUM_THREADS": str(THREADS_PER_RANK),
                },
            )
            for rank in range(ranks)
        ]
        try:
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes):  # The others would wait for it.
                    sys.exit(1)
                time.sleep(POLL_SECONDS)
            if any(process.returncode for process in processes):
                sys.exit(1)
        finally:
            for process in processes:
                process.kill()
        return json.loads(_answer(folder).read_text())


def is_rank() -> bool:
    """Whether `ask_ranks`, or the like, has started this process."""
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
