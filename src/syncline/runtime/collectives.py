"""Collectives by group name, and the count of what they send.

The backend follows the device: NCCL on CUDA, Gloo on the CPU. Where the host waits, a failure names what was waited
for; NCCL's own watchdog ends a process whose device waits too long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.program.costs import wire_bytes
from syncline.program.program import Program

OPERATIONS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}


class CommunicationError(RuntimeError):
    """A collective or message did not complete: a peer died, or the timeout passed."""


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Turn a backend's failure into one that says what was waited for."""
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(f"rank {dist.get_rank()} waited for {what}, which did not come: {error}") from error


class Traffic:
    """Bytes that this rank has sent since the last restart."""

    def __init__(self) -> None:
        self.sent = 0

    def restart(self) -> None:
        self.sent = 0


class Pending:
    """A started reduction; `wait` returns once its result may be read."""

    def __init__(self, work: dist.Work | None, what: str, source: Tensor, wire: Tensor) -> None:
        self._work = work
        self._what = what
        self._source = source
        self._wire = wire

    def wait(self) -> None:
        if self._work is not None:
            with waiting_for(self._what):
                self._work.wait()
        if self._wire is not self._source:
            self._source.copy_(self._wire)


class Collectives:
    """The process groups that a program names, created once, in the same order on every rank."""

    def __init__(self, programs: Iterable[Program], rank: int, reduce_dtype: torch.dtype, timeout: timedelta) -> None:
        self.traffic = Traffic()
        self._reduce_dtype = reduce_dtype
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._members: dict[str, tuple[int, ...]] = {}
        for program in programs:
            self._create(program, rank, timeout)

    def reduce(self, flat: Tensor, group: str, op: str, kind: str, what: str) -> Pending:
        """Start reducing `flat` in place over `group`, in the dtype chosen for the wire."""
        assert kind == "all_reduce", f"unknown reduction {kind}"
        wire = flat if flat.dtype == self._reduce_dtype else flat.to(self._reduce_dtype)
        work = self._all_reduce(wire, group, OPERATIONS[op])
        return Pending(work, what, flat, wire)

    def sum(self, tensor: Tensor, group: str, what: str) -> None:
        """Sum `tensor` in place over `group`, now."""
        Pending(self._all_reduce(tensor, group, dist.ReduceOp.SUM), what, tensor, tensor).wait()

    def _all_reduce(self, tensor: Tensor, group: str, op: dist.ReduceOp.RedOpType) -> dist.Work | None:
        members = self._members[group]
        self.traffic.sent += wire_bytes("all_reduce", len(members), tensor.numel() * tensor.element_size())
        if len(members) == 1:
            return None
        return dist.all_reduce(tensor, op=op, group=self._groups[members], async_op=True)

    def _create(self, program: Program, rank: int, timeout: timedelta) -> None:
        names = [
            group
            for actions in program.ranks
            for group in dict.fromkeys(getattr(action, "group", None) for action in actions)
            if group is not None
        ]
        for name in dict.fromkeys(names):
            for other in range(program.topology.world_size):
                if name.startswith("tied:") and not _holds(program, other, name):
                    continue
                members = program.members(other, name)
                if other == rank:
                    self._members[name] = members
                if len(members) > 1 and members not in self._groups:
                    self._groups[members] = dist.new_group(list(members), timeout=timeout)


def _holds(program: Program, rank: int, group: str) -> bool:
    return rank in program.members(rank, group)
