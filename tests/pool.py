"""The one pool of rank processes that all multi-rank tests share.

Starting a process and importing torch takes seconds, a process group milliseconds. So the processes stay, and every
call gets a Gloo group of its own: what a failed test leaves behind ends with its group, or with its process.

    def gradients(rank: int, world_size: int, seed: int) -> torch.Tensor: ...   # a top-level function of a test file

    def test_gradients(pool):
        first, second = pool.run(2, gradients, 0)
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from typing import IO, Any
from unittest import mock

import torch
import torch.distributed as dist

from syncline.distributed.failures import Failure, FailureKind, cause, failure_of
from syncline.distributed.rank import die_with_parent

MOST_RANKS = 8
GRACE_SECONDS = 5.0
"""How long the other ranks may take to notice that one has failed."""
TRACE_SECONDS = 1.0
"""How long before its deadline a hanging rank writes down where it hangs."""
SAME_KERNELS = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
"""Environment of the ranks: PyTorch, MKL and oneDNN compute the same bits on every processor. Models are so small that
it costs no time.
"""


class RankFailure(Exception):
    """A function failed on one rank; the message holds the traceback from there."""

    def __init__(self, failure: Failure) -> None:
        self.rank = failure.rank
        super().__init__(f"rank {failure.rank}: {failure.message}\n{failure.traceback}")


@dataclass(frozen=True)
class _Call:
    world_size: int
    number: int
    timeout: float
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class _Result:
    value: Any


class _Farewell:
    """The rank has left the call's group and is ready for the next call."""


@dataclass(frozen=True)
class _Rank:
    process: Any
    """A process of the spawn context."""
    pipe: connection.Connection
    trace: IO[bytes]
    """Where the rank writes the stacks of its threads when it hangs."""


class Pool:
    """Processes for ranks 0 to 7, started when first needed, each with one thread."""

    def __init__(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ranks: dict[int, _Rank] = {}
        self._calls = 0

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> list[Any]:
        """`function(rank, world_size, *arguments)` on ranks 0 to `ranks` - 1; what each returned, by rank.

        A fresh default process group of exactly these ranks stands during the call, and torch's seed is 0. Function,
        arguments and results travel by pickle. Raises `RankFailure` for the rank that failed first, also when one
        died, or has not returned after `timeout` seconds; ranks that then do not answer are replaced.
        """
        assert 1 <= ranks <= MOST_RANKS, ranks
        self._start(ranks)
        self._calls += 1
        call = pickle.dumps(_Call(ranks, self._calls, timeout, function, arguments))
        for rank in range(ranks):
            self._ranks[rank].pipe.send_bytes(call)
        results, failures = self._collect(ranks, timeout)
        if failures:
            raise RankFailure(cause(failures))
        return [results[rank] for rank in range(ranks)]

    def close(self) -> None:
        for rank in list(self._ranks):
            self._discard(rank)

    def _start(self, ranks: int) -> None:
        context = get_context("spawn")
        for rank in range(ranks):
            if rank in self._ranks and self._ranks[rank].process.is_alive():
                continue
            ours, theirs = context.Pipe()
            trace = tempfile.NamedTemporaryFile(prefix=f"rank{rank}-", suffix=".trace")  # noqa: SIM115
            parameters = (rank, os.getpid(), self._store.port, theirs, trace.name)
            process = context.Process(target=_serve, args=parameters, daemon=True)
            with mock.patch.dict(os.environ, SAME_KERNELS):
                process.start()
            theirs.close()
            self._ranks[rank] = _Rank(process, ours, trace)

    def _collect(self, ranks: int, timeout: float) -> tuple[dict[int, Any], list[Failure]]:
        """Gather a result or failure, and then a farewell, from every rank."""
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        deadline = time.monotonic() + timeout
        waiting = {self._ranks[rank].pipe: rank for rank in range(ranks)}
        while waiting:
            readable = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not readable:
                failures.append(self._end_hang(sorted(waiting.values()), timeout, cause_known=bool(failures)))
                break
            for pipe in readable:
                assert isinstance(pipe, connection.Connection)
                rank = waiting[pipe]
                message = self._receive(rank)
                if isinstance(message, _Result):
                    results[rank] = message.value
                if isinstance(message, Failure):
                    failures.append(message)
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                if isinstance(message, _Farewell) or rank not in self._ranks:
                    del waiting[pipe]
        return results, failures

    def _receive(self, rank: int) -> _Result | Failure | _Farewell:
        """The next message of a rank. The death of its process is a failure like another."""
        try:
            message: _Result | Failure | _Farewell = pickle.loads(self._ranks[rank].pipe.recv_bytes())
            return message
        except (EOFError, ConnectionError):
            self._ranks[rank].process.join()
            status = self._ranks[rank].process.exitcode
            self._discard(rank)
            return Failure(rank, FailureKind.SILENT, time.time(), f"the process ended with status {status}")

    def _end_hang(self, hanging: list[int], timeout: float, cause_known: bool) -> Failure:
        stacks = "".join(f"rank {rank}:\n{self._ranks[rank].trace.read().decode()}" for rank in hanging)
        for rank in hanging:
            self._discard(rank)
        kind = FailureKind.CONSEQUENCE if cause_known else FailureKind.ERROR
        return Failure(hanging[0], kind, time.time(), f"ranks {hanging} have not returned after {timeout:g} s", stacks)

    def _discard(self, rank: int) -> None:
        dead = self._ranks.pop(rank)
        dead.process.kill()
        dead.process.join()
        dead.pipe.close()
        dead.trace.close()


def _serve(rank: int, parent: int, port: int, pipe: connection.Connection, trace: str) -> None:
    """The life of one rank process: one call after another, until the pool closes its end."""
    die_with_parent(parent)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with open(trace, "w") as trace_file:
        while True:
            try:
                message = pipe.recv_bytes()
            except EOFError:
                return
            _answer(rank, message, store, pipe, trace_file)


def _answer(rank: int, message: bytes, store: dist.Store, pipe: connection.Connection, trace: IO[str]) -> None:
    """Send the outcome, then leave the group, then say so: a failure is known before peers lose their connections."""
    try:
        call: _Call = pickle.loads(message)
        faulthandler.dump_traceback_later(max(0.1, call.timeout - TRACE_SECONDS), file=trace)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"call{call.number}", store),
            rank=rank,
            world_size=call.world_size,
            timeout=timedelta(seconds=call.timeout),
        )
        torch.manual_seed(0)
        reply = pickle.dumps(_Result(call.function(rank, call.world_size, *call.arguments)))
    except BaseException as error:
        reply = pickle.dumps(failure_of(rank, error))
    pipe.send_bytes(reply)
    faulthandler.cancel_dump_traceback_later()
    # A worker and its model refer to each other, and so keep process groups: threads that wake up all the time.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_default_dtype(torch.float32)
    sys.stdout.flush()
    pipe.send_bytes(pickle.dumps(_Farewell()))
