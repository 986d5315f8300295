"""Starting ranks on this machine, watching them, and ending them all when one ends badly or the user wants it.

The processes are started and ended by torch's elastic multiprocessing, without its agent: restarts and several nodes
are torchrun's business, and under torchrun this file is not used. What is added is what a failing run needs: the
traceback of the rank that failed first instead of its peers' broken connections, an end within seconds, and no process
left behind. The ranks' side of it is `syncline.distributed.rank.run_rank`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from syncline.distributed.failures import Failure, FailureKind, read_failure, report_failures
from syncline.distributed.rank import LAUNCHER_VARIABLE

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import SubprocessContext

POLL_SECONDS = 0.05
GRACE_SECONDS = 3
"""How long a rank that was told to end may take before it is killed."""
SETTLE_SECONDS = 2.0
"""How long to look for the failure that broke a peer's connection before the broken connection itself is reported."""


def launch(arguments: Sequence[str], processes: int, *, threads_per_rank: int | None = None) -> int:
    """Run `python *arguments` as `processes` ranks on this machine and wait for them.

    The ranks find each other by `rank_environment()` and `join()`, through a store that this process holds.
    `threads_per_rank` becomes their OMP_NUM_THREADS; without it an OMP_NUM_THREADS of the user's stands, or the cores
    are divided among the ranks. To be called from the main thread, for signals arrive there.

    Returns the exit status, when all ranks have ended: 0; 1 when a rank failed (it is named on stderr, with its
    traceback); 2 when a rank refused the request; 128 + n when signal n ended the run (Ctrl-C: 130, SIGTERM: 143).
    """
    try:
        from torch.distributed import TCPStore
        from torch.distributed.elastic.multiprocessing import SignalException

        with _signals_handled(), tempfile.TemporaryDirectory(prefix="syncline-") as folder:
            # Held here, on a port the system chose, so that neither a taken port nor the death of rank 0 can matter.
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            threads = threads_per_rank or _threads_per_rank(processes)
            environments = {rank: _environment(rank, processes, store.port, threads) for rank in range(processes)}
            try:
                failures = _watch(_start(arguments, environments, folder))
            except SignalException as interruption:
                return 128 + interruption.sigval
        return report_failures(failures, processes)
    except KeyboardInterrupt:  # before elastic's own handlers stand
        return 128 + signal.SIGINT


def _environment(rank: int, processes: int, port: int, threads: int) -> dict[str, str]:
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": str(threads),
        LAUNCHER_VARIABLE: str(os.getpid()),
    }
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        # Otherwise Gloo looks the host name up, which fails or leads astray on machines with odd networks.
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment


def _threads_per_rank(processes: int) -> int:
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if chosen.isdecimal() and int(chosen) > 0:
        return int(chosen)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes)


def _start(arguments: Sequence[str], environments: dict[int, dict[str, str]], folder: str) -> SubprocessContext:
    """Start one process per environment, each in a session of its own, so that a terminal's Ctrl-C comes here only."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SubprocessContext, start_processes

    # Elastic's own account of closed processes and exit codes would bury the traceback.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    ranks = start_processes(
        name="rank",
        entrypoint=sys.executable,
        args={rank: tuple(arguments) for rank in environments},
        envs=environments,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
    )
    assert isinstance(ranks, SubprocessContext)
    return ranks


def _watch(ranks: SubprocessContext) -> list[Failure]:
    """Wait until all ranks have ended well, or one has failed; end the others; return the failures."""
    try:
        ended = _ended(ranks)
        while len(ended) < ranks.nprocs and not any(ended.values()):
            time.sleep(POLL_SECONDS)
            ended = _ended(ranks)
        seen, deadline = time.time(), time.monotonic() + SETTLE_SECONDS
        while (
            len(ended) < ranks.nprocs
            and _only_consequences(_failures(ranks, ended, seen))
            and time.monotonic() < deadline
        ):
            time.sleep(POLL_SECONDS)
            ended = _ended(ranks)
    finally:
        _end(ranks)
    return _failures(ranks, ended, seen)


def _ended(ranks: SubprocessContext) -> dict[int, int]:
    """The exit status of the ranks that have ended; minus n for signal n."""
    statuses = {rank: handler.proc.poll() for rank, handler in ranks.subprocess_handlers.items()}
    return {rank: status for rank, status in statuses.items() if status is not None}


def _only_consequences(failures: Sequence[Failure]) -> bool:
    return bool(failures) and all(each.kind is FailureKind.CONSEQUENCE for each in failures)


def _failures(ranks: SubprocessContext, ended: Mapping[int, int], seen: float) -> list[Failure]:
    """What the ranks recorded, and what is known of those that `ended` badly without a record, at the time `seen`."""
    failures = []
    for rank, path in ranks.error_files.items():
        if os.path.exists(path):
            failures.append(read_failure(rank, path))
        elif status := ended.get(rank, 0):
            failures.append(Failure(rank, FailureKind.SILENT, seen, _describe(status)))
    return failures


def _describe(status: int) -> str:
    if status > 0:
        return f"ended with status {status} and no message"
    name = signal.Signals(-status).name
    return f"was killed by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")


def _end(ranks: SubprocessContext) -> None:
    """End every rank that still runs."""
    for number in _handled_signals():  # an impatient user's second Ctrl-C must not interrupt this
        signal.signal(number, signal.SIG_IGN)
    ranks.close(signal.SIGTERM, timeout=GRACE_SECONDS)
    if sys.stderr.isatty():
        show_cursor = "\x1b[?25h"  # hidden by a rank that was ended in the middle of a live display
        sys.stderr.write(show_cursor)
        sys.stderr.flush()


def _handled_signals() -> list[signal.Signals]:
    """The signals that end a run. A hang-up does not where it was ignored from the start, as `nohup` does."""
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP]
    return [n for n in numbers if n is not signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]


@contextmanager
def _signals_handled() -> Iterator[None]:
    """Let elastic handle these signals, which it does for good, and restore the handlers of before."""
    handlers = {number: signal.getsignal(number) for number in _handled_signals()}
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in handlers)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
