"""Collectives by group name, and the count of what they send.

The backend follows the device: NCCL on CUDA, Gloo on the CPU. Where the host waits, a failure names what was waited
for; NCCL's own watchdog ends a process whose device waits too long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.program.actions import Action, GatherParameters, ReduceGradients
from syncline.program.analysis.costs import group_name, wire_bytes
from syncline.program.program import Program
from syncline.runtime.buckets import GradientBucket, ParameterBucket
from syncline.runtime.communication.exchange import (
    OPERATIONS,
    Peers,
    Pending,
    start_all_gather,
    start_broadcast,
    start_reduce,
    start_reduce_scatter,
)

SHARED, REDUCTIONS, PARAMETERS = "shared", "reductions", "parameters"
"""Communicators over the same ranks: what travels on one of them never waits for what travels on another."""


class Traffic:
    """What this rank has sent, and how many gradient reductions it took part in, since the last restart."""

    def __init__(self) -> None:
        self.by_group: Counter[str] = Counter()
        """Bytes by group name; messages between stages are `pp`."""
        self.reductions = 0

    @property
    def sent(self) -> int:
        """Bytes in all."""
        return self.by_group.total()

    def restart(self) -> None:
        self.by_group.clear()
        self.reductions = 0

    @contextmanager
    def counted_apart(self) -> Iterator[None]:
        """What is sent within is counted from zero, and forgotten behind it."""
        before, reductions = self.by_group, self.reductions
        self.by_group, self.reductions = Counter(), 0
        yield
        self.by_group, self.reductions = before, reductions


class Collectives:
    """The process groups that programs name, created once, in the same order on every rank."""

    def __init__(self, programs: Iterable[Program], rank: int, reduce_dtype: torch.dtype, timeout: timedelta) -> None:
        self.traffic = Traffic()
        self._rank = rank
        self._reduce_dtype = reduce_dtype
        self._groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._members: dict[str, tuple[int, ...]] = {}
        for program in programs:
            self._create(program, rank, timeout)

    def reduce(self, bucket: GradientBucket, action: ReduceGradients) -> Pending:
        """Start a reduction of a bucket's gradient in place, in the dtype chosen for the wire."""
        what = f"the reduction of bucket {action.bucket} over {action.group}"
        self.traffic.reductions += 1
        if action.kind == "all_reduce":
            # Of what was reduced to its owners before only the owned part is worth anything.
            return self._reduce_all(bucket.owned, action.group, action.op, what)
        peers = self._peers(action.group, REDUCTIONS)
        owner = bucket.bucket.owner
        self._count(action, bucket.bucket.numel * self._reduce_dtype.itemsize, owner in (None, peers.own))
        dtype, tag = self._reduce_dtype, action.bucket
        if action.kind == "reduce_scatter":
            return start_reduce_scatter(bucket.flat, peers, action.op, dtype, tag, what)
        assert action.kind == "reduce", action.kind
        assert owner is not None
        return start_reduce(bucket.flat, peers, owner, action.op, dtype, tag, what)

    def gather(self, bucket: ParameterBucket, action: GatherParameters) -> Pending:
        """Start filling a bucket's flat parameters with what their owners have."""
        what = f"the parameters of bucket {action.bucket} from their owners in {action.group}"
        peers = self._peers(action.group, PARAMETERS)
        owner = bucket.bucket.owner
        self._count(action, bucket.flat.nbytes, owner in (None, peers.own))
        if action.kind == "all_gather":
            return start_all_gather(bucket.flat, peers, action.bucket, what)
        assert action.kind == "broadcast", action.kind
        assert owner is not None
        return start_broadcast(bucket.flat, peers, owner, action.bucket, what)

    def sum(self, tensor: Tensor, group: str, what: str) -> None:
        """Sum `tensor` in place over `group`, now."""
        self._all_reduce(tensor, group, "sum", what).wait()

    def _reduce_all(self, flat: Tensor, group: str, op: str, what: str) -> Pending:
        if flat.dtype == self._reduce_dtype:
            return self._all_reduce(flat, group, op, what)
        wire = flat.to(self._reduce_dtype)
        reduction = self._all_reduce(wire, group, op, what)

        def bring_back() -> None:
            reduction.wait()
            flat.copy_(wire)

        return Pending([], what, bring_back)

    def _all_reduce(self, tensor: Tensor, group: str, op: str, what: str) -> Pending:
        members = self._members[group]
        self.traffic.by_group[group_name(group)] += wire_bytes("all_reduce", len(members), tensor.nbytes)
        if len(members) == 1:
            return Pending([], what)
        work = dist.all_reduce(tensor, OPERATIONS[op], group=self._groups[SHARED, members], async_op=True)
        return Pending([work], what)

    def _count(self, action: ReduceGradients | GatherParameters, payload: int, owner: bool) -> None:
        members = len(self._members[action.group])
        self.traffic.by_group[action.group] += wire_bytes(action.kind, members, payload, owner=owner)

    def _peers(self, group: str, channel: str) -> Peers:
        members = self._members[group]
        return Peers(self._groups[channel, members], members, members.index(self._rank))

    def _create(self, program: Program, rank: int, timeout: timedelta) -> None:
        for name, channel in _communicators(program):
            for other in range(program.topology.world_size):
                if name.startswith("tied:") and other not in program.members(other, name):
                    continue
                members = program.members(other, name)
                if other == rank:
                    self._members[name] = members
                if len(members) > 1 and (channel, members) not in self._groups:
                    self._groups[channel, members] = dist.new_group(list(members), timeout=timeout)


def _communicators(program: Program) -> list[tuple[str, str]]:
    """(group name, channel) of everything that the program does, in an order that all ranks agree on."""
    found = [
        (group, _channel(action))
        for actions in program.ranks
        for action in actions
        if (group := getattr(action, "group", None)) is not None
    ]
    return list(dict.fromkeys(found))


def _channel(action: Action) -> str:
    if isinstance(action, GatherParameters):
        return PARAMETERS
    return REDUCTIONS if isinstance(action, ReduceGradients) and action.kind != "all_reduce" else SHARED
