"""Reductions to owners and gathers from owners, started at once and completed when they are waited for.

NCCL has collectives for them. Gloo's reduce-scatter moves the bytes of an all-reduce, and both it and its all-gather
copy everything once more; there the ranks send each other what the other needs, straight from and into the buckets:
(n - 1)/n of the bucket from each rank, all pairs at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.runtime.communication.errors import waiting_for


@dataclass(frozen=True)
class Peers:
    """A group as one of its members sees it."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    """Global ranks in the order of their shards."""
    own: int
    """The place of this rank among them."""

    @property
    def others(self) -> list[int]:
        """The places of the other members, beginning behind this one, so that not all send to the same at once."""
        n = len(self.ranks)
        return [(self.own + step) % n for step in range(1, n)]


class Pending:
    """A started collective; `wait` returns once its result may be read, and lets go of all that it has kept alive."""

    def __init__(self, works: Sequence[dist.Work | None], what: str, finish: Callable[[], None] | None = None) -> None:
        self._works = [work for work in works if work is not None]
        self._what = what
        self._finish = finish

    def wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            with waiting_for(self._what):
                work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


def start_reduce_scatter(flat: Tensor, peers: Peers, op: str, dtype: torch.dtype, tag: int, what: str) -> Pending:
    """Bring this rank's slice of `flat` (numel,) to the sum or average of all ranks' slices, which travel in `dtype`.

    The other slices keep what they hold or not. The order of additions is fixed by the ranks.
    """
    n = len(peers.ranks)
    if flat.is_cuda:
        wire = flat.to(dtype)
        own = wire.chunk(n)[peers.own]
        work = dist.reduce_scatter_tensor(own, wire, OPERATIONS[op], group=peers.group, async_op=True)
        target = flat.chunk(n)[peers.own]
        return Pending([work], what, None if wire is flat else lambda: _copy(target, own))
    slices = flat.chunk(n)
    received = {place: torch.empty(slices[0].numel(), dtype=dtype) for place in peers.others}
    sent = [slices[place].to(dtype) for place in peers.others]
    works = _post(peers, zip(peers.others, sent, strict=True), received.items(), tag, what)
    return Pending(works, what, lambda: _add(slices[peers.own], [received[p] for p in sorted(received)], op, n))


def start_reduce(flat: Tensor, peers: Peers, owner: int, op: str, dtype: torch.dtype, tag: int, what: str) -> Pending:
    """Bring `flat` (numel,) on the rank at place `owner` to the sum or average of all ranks'."""
    n = len(peers.ranks)
    if flat.is_cuda:
        wire = flat.to(dtype)
        work = dist.reduce(wire, peers.ranks[owner], OPERATIONS[op], group=peers.group, async_op=True)
        owns = peers.own == owner and wire is not flat
        return Pending([work], what, (lambda: _copy(flat, wire)) if owns else None)
    if peers.own != owner:
        return Pending(_post(peers, [(owner, flat.to(dtype))], [], tag, what), what)
    received = {place: torch.empty(flat.numel(), dtype=dtype) for place in peers.others}
    works = _post(peers, [], received.items(), tag, what)
    return Pending(works, what, lambda: _add(flat, [received[p] for p in sorted(received)], op, n))


def start_all_gather(flat: Tensor, peers: Peers, tag: int, what: str) -> Pending:
    """Fill `flat` (numel,) with every rank's own slice of it."""
    slices = flat.chunk(len(peers.ranks))
    own = slices[peers.own]
    if flat.is_cuda:
        return Pending([dist.all_gather_into_tensor(flat, own, group=peers.group, async_op=True)], what)
    sends = [(place, own) for place in peers.others]
    return Pending(_post(peers, sends, [(place, slices[place]) for place in peers.others], tag, what), what)


def start_broadcast(flat: Tensor, peers: Peers, owner: int, tag: int, what: str) -> Pending:
    """Fill `flat` (numel,) with what the rank at place `owner` has."""
    if flat.is_cuda:
        return Pending([dist.broadcast(flat, peers.ranks[owner], group=peers.group, async_op=True)], what)
    if peers.own == owner:
        return Pending(_post(peers, [(place, flat) for place in peers.others], [], tag, what), what)
    return Pending(_post(peers, [], [(owner, flat)], tag, what), what)


OPERATIONS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}

Message = tuple[int, Tensor]
"""The place of the other rank, and what is sent to it or received from it."""


def _post(
    peers: Peers, sends: Iterable[Message], receives: Iterable[Message], tag: int, what: str
) -> list[dist.Work | None]:
    with waiting_for(what):
        works = [dist.irecv(tensor, peers.ranks[place], group=peers.group, tag=tag) for place, tensor in receives]
        works += [dist.isend(tensor, peers.ranks[place], group=peers.group, tag=tag) for place, tensor in sends]
        return works


def _add(own: Tensor, others: Sequence[Tensor], op: str, n: int) -> None:
    for other in others:
        own.add_(other)
    if op == "avg":
        own.div_(n)


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
