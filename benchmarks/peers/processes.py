"""Peers in processes of their own: started, asked for a turn at a time, and ended. The other end is `host.py`."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import IO, Any

import syncline
from link import Link
from peers.messages import receive, send
from ranks import RANKS, THREADS_PER_RANK

BENCHMARKS = Path(__file__).parents[1]
LOG_LINES = 30
"""Shown of what a peer wrote before it failed."""
POLL_SECONDS = 1.0
PORTS = range(20_000, 30_000)
"""Below those that systems hand out by themselves: a free one stays free until a peer listens there."""


class PeerRefused(Exception):
    """The peer cannot run as it is set; the message says why."""


class PeerFailed(Exception):
    """The peer broke; the message shows where."""


@dataclass(frozen=True)
class TurnFigures:
    """Two steps in a row of both ranks; memory is that of the larger one, in bytes above an idle interpreter's."""

    seconds: float
    """Of the second step, on the slower rank."""
    bytes_sent: int
    """Per step, by both ranks together, as the kernel counts it."""
    peak_bytes: int
    held_bytes: int
    """Between this turn and the next."""
    losses: tuple[float, ...]
    """Of each step before its update, the mean over the global batch."""


class Peer:
    """One trainer on both ranks, which waits unless it is asked."""

    def __init__(self, name: str, link: Link, logs: list[Path]) -> None:
        self.name = name
        self._link = link
        self._logs = logs
        self._streams: list[IO[str]] = []
        self._processes: list[int] = []

    def attach(self, rank: int, process: int, stream: IO[str]) -> None:
        assert rank == len(self._streams)
        self._streams.append(stream)
        self._processes.append(process)

    def wait_until_started(self) -> None:
        """Raises `PeerRefused` or `PeerFailed`."""
        for rank in range(RANKS):
            self._answer(rank)

    def take_turn(self) -> TurnFigures:
        """Raises `PeerFailed`."""
        for stream in self._streams:
            send(stream, {"turn": True})
        answers = [self._answer(rank) for rank in range(RANKS)]
        sent = [int(answer["sent"]) for answer in answers]
        return TurnFigures(
            seconds=max(answer["seconds"] for answer in answers),
            bytes_sent=sent[0] if self._link.is_shared else sum(sent),
            peak_bytes=max(answer["peak"] for answer in answers),
            held_bytes=max(answer["held"] for answer in answers),
            losses=tuple(map(mean, zip(*(answer["losses"] for answer in answers), strict=True))),
        )

    def end(self) -> None:
        for stream in self._streams:
            with suppress(OSError):
                stream.close()
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _answer(self, rank: int) -> dict[str, Any]:
        answer = receive(self._streams[rank])
        if answer is None:
            log = "\n".join(self._logs[rank].read_text(errors="replace").splitlines()[-LOG_LINES:])
            raise PeerFailed(f"{self.name}: rank {rank} ended without an answer, perhaps for want of memory\n{log}")
        if "refused" in answer:
            raise PeerRefused(f"{self.name}: skipped: {answer['refused']}")
        if "failed" in answer:
            raise PeerFailed(f"{self.name}: rank {rank} failed\n{answer['failed']}")
        return answer


class PeerProcesses:
    """The peers of one link."""

    def __init__(self, link: Link, folder: Path, hosts: list[subprocess.Popen[str]], listener: socket.socket) -> None:
        self._link = link
        self._folder = folder
        self._hosts = hosts
        self._listener = listener
        self._started = 0

    @contextmanager
    def peer(self, name: str, *, returns_memory: bool = False) -> Iterator[Peer]:
        """A running peer. With `returns_memory` freed tensors go back to the system at once, which takes time.

        Raises `PeerRefused` or `PeerFailed`.
        """
        self._started += 1
        logs = [self._folder / f"{self._started}-{name}-{rank}.log" for rank in range(RANKS)]
        peer = Peer(name, self._link, logs)
        request = {
            "peer": name,
            "port": _free_port(),
            "socket": self._listener.getsockname(),
            "interface": self._link.interface,
            "returns_memory": returns_memory,
        }
        try:
            for rank, host in enumerate(self._hosts):
                assert host.stdin is not None
                send(host.stdin, {**request, "log": str(logs[rank])})
                stream = self._accept().makefile("rw")
                greeting = receive(stream)
                if greeting is None:
                    raise PeerFailed(f"{name}: rank {rank} ended at once")
                peer.attach(rank, greeting["pid"], stream)
            peer.wait_until_started()
            yield peer
        finally:
            peer.end()

    def _accept(self) -> socket.socket:
        while True:
            with suppress(TimeoutError):
                return self._listener.accept()[0]
            for rank, host in enumerate(self._hosts):
                if host.poll() is not None:
                    log = (self._folder / f"host-{rank}.log").read_text(errors="replace")
                    raise PeerFailed(
                        f"the process that peers of rank {rank} start from has ended: {_status(host)}\n{log}"
                    )


@contextmanager
def peer_processes(link: Link, python: Path) -> Iterator[PeerProcesses]:
    """Processes of `python` on both ends of a link, from which peers can be started; all end with the `with` statement.

    Let one peer take its turn at a time: bytes on a link are counted for all of its processes.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(_folder()))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(folder / "socket"))
        listener.listen()
        listener.settimeout(POLL_SECONDS)
        hosts = [stack.enter_context(_host(link, rank, python, folder)) for rank in range(RANKS)]
        yield PeerProcesses(link, folder, hosts, listener)


@contextmanager
def _host(link: Link, rank: int, python: Path, folder: Path) -> Iterator[subprocess.Popen[str]]:
    # In a session of its own: Ctrl-C comes to the benchmark alone, which ends its hosts, and they their peers.
    with open(folder / f"host-{rank}.log", "w") as log:
        host = subprocess.Popen(
            [*link.within(rank), str(python), "-m", "peers.host"],
            env=_environment(link, rank, folder),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    try:
        yield host
    finally:
        host.kill()
        host.wait()
        assert host.stdin is not None
        with suppress(ConnectionError):
            host.stdin.close()


def _environment(link: Link, rank: int, folder: Path) -> dict[str, str]:
    # Tuning of the allocator that the user has made for other programs would hold for some peers and not for others.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), str(Path(syncline.__path__[0]).parent)]),
        "TMPDIR": str(folder),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": link.address,
        "GLOO_SOCKET_IFNAME": link.interface,
        "OMP_NUM_THREADS": str(THREADS_PER_RANK),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _status(host: subprocess.Popen[str]) -> str:
    status = host.returncode
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"


def _folder() -> tempfile.TemporaryDirectory[str]:
    # Peers that are being ended may still write there.
    return tempfile.TemporaryDirectory(prefix="syncline-benchmark-", ignore_cleanup_errors=True)


def _free_port() -> int:
    """Free on this machine; in a namespace of our own any is."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise PeerFailed(f"no port from {PORTS[0]} to {PORTS[-1]} is free")
