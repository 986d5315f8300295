"""Activations and their gradients between neighbouring stages, of any shape, safely.

A receive of another size than was sent corrupts memory or aborts the process, so a receiver never guesses: the sender
announces dtype and shape in a small fixed-size header. Headers are remembered by what both sides know, the shape of the
micro-batch, and are sent once for each, once per step, or with every message (`ShapeExchange`). Headers are not counted
as traffic.

Activations and gradients travel on communicators of their own, and so do, of each, those to higher and those to lower
ranks: what one rank sends and what its neighbour sends never wait for one another.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.program.actions import PointToPoint
from syncline.program.program import Program
from syncline.runtime.communication.collectives import Traffic
from syncline.runtime.communication.errors import waiting_for
from syncline.strategy import ShapeExchange

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
MAX_DIMENSIONS = 6
TO_HIGHER, TO_LOWER = True, False
"""Whether the receiver is the higher rank."""

Key = tuple[int, str, tuple[int, ...]]
"""Peer, direction, shape of the micro-batch."""

Lane = tuple[str, bool]
"""Direction, and whether the receiver is the higher rank."""

Header = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class _UnderWay:
    """A message on its way, and the tensors that must live until it has left, or come."""

    works: list[dist.Work]
    parts: list[Tensor]
    what: str

    def wait(self) -> None:
        for work in self.works:
            with waiting_for(self.what):
                work.wait()


class Transport:
    """Sends return at once while as few earlier ones are on their way as the program allows; receives wait.

    Headers stay on the host, where both sides read them without waiting for a device.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        exchange: ShapeExchange,
        device: torch.device,
        traffic: Traffic,
        timeout: timedelta,
    ) -> None:
        """`programs` are all that will run, with one topology; the ranks of the world come here together."""
        self._in_flight = max(program.messages_in_flight for program in programs)
        self._exchange = exchange
        self._device = device
        self._traffic = traffic
        self._sent_headers: dict[Key, Header] = {}
        self._received_headers: dict[Key, Header] = {}
        self._leaving: defaultdict[tuple[int, str], deque[_UnderWay]] = defaultdict(deque)
        self._coming: defaultdict[tuple[int, str], deque[_UnderWay | None]] = defaultdict(deque)
        """Messages that have been asked for ahead; None for one that could not be."""
        self._groups = _groups(programs, timeout)

    def send(self, action: PointToPoint, tensor: Tensor, micro_batch_shape: tuple[int, ...]) -> None:
        """Start sending `tensor` to the action's peer."""
        leaving = self._leaving[action.peer, action.direction]
        while len(leaving) >= self._in_flight:
            leaving.popleft().wait()
        key = (action.peer, action.direction, micro_batch_shape)
        header = (tensor.dtype, tuple(tensor.shape))
        parts = [tensor.contiguous()]
        if self._exchange is ShapeExchange.EVERY_MESSAGE or key not in self._sent_headers:
            parts.insert(0, _encode(header))
            self._sent_headers[key] = header
        assert header == self._sent_headers[key], "the same micro-batch shape gave another activation shape"
        self._traffic.by_group["pp"] += tensor.nbytes
        leaving.append(self._start(parts, action))

    def start_receiving(self, action: PointToPoint, micro_batch_shape: tuple[int, ...]) -> None:
        """Let the next message of the action's peer come, if its shape is known; `receive` waits for it."""
        channel, key = (action.peer, action.direction), (action.peer, action.direction, micro_batch_shape)
        coming = self._coming[channel]
        # Messages come in the order in which they are asked for: none may be asked for before one that cannot be yet.
        if self._is_announced(key) or None in coming:
            coming.append(None)
        else:
            coming.append(self._ask_for(self._empty(key), action))

    def receive(self, action: PointToPoint, micro_batch_shape: tuple[int, ...]) -> Tensor:
        """The tensor that the action's peer sent, once it is there."""
        key = (action.peer, action.direction, micro_batch_shape)
        coming = self._coming[action.peer, action.direction]
        started = coming.popleft() if coming else None
        if started is None:
            if self._is_announced(key):
                header = self._ask_for(torch.empty(2 + MAX_DIMENSIONS, dtype=torch.int64), action)
                header.wait()
                self._received_headers[key] = _decode(header.parts[0])
            started = self._ask_for(self._empty(key), action)
        started.wait()
        return started.parts[0]

    def _is_announced(self, key: Key) -> bool:
        """Whether the next message of that kind begins with a header."""
        return self._exchange is ShapeExchange.EVERY_MESSAGE or key not in self._received_headers

    def _empty(self, key: Key) -> Tensor:
        dtype, shape = self._received_headers[key]
        return torch.empty(shape, dtype=dtype, device=self._device)

    def end_step(self) -> None:
        """Wait until everything has left."""
        for leaving in self._leaving.values():
            while leaving:
                leaving.popleft().wait()
        if self._exchange is ShapeExchange.EACH_STEP:
            self._sent_headers.clear()
            self._received_headers.clear()

    def _start(self, parts: list[Tensor], action: PointToPoint) -> _UnderWay:
        what = f"rank {action.peer} to take {_describe(action)}"
        with waiting_for(what):
            group = self._groups[action.direction, action.peer > dist.get_rank()]
            works = [dist.isend(part, action.peer, group=group) for part in parts]
        return _UnderWay([work for work in works if work is not None], parts, what)

    def _ask_for(self, tensor: Tensor, action: PointToPoint) -> _UnderWay:
        what = f"{_describe(action)} from rank {action.peer}"
        with waiting_for(what):
            group = self._groups[action.direction, action.peer < dist.get_rank()]
            work = dist.irecv(tensor, action.peer, group=group)
        assert work is not None
        return _UnderWay([work], [tensor], what)


def _describe(action: PointToPoint) -> str:
    return f"the {action.direction} of micro-batch {action.micro_batch} at stage {action.stage}"


def _groups(programs: Sequence[Program], timeout: timedelta) -> dict[Lane, dist.ProcessGroup]:
    """The communicators of the own pipeline; groups are created by all ranks of the world together."""
    groups: dict[Lane, dist.ProcessGroup] = {}
    lanes: list[Lane] = [("activation", TO_HIGHER), ("gradient", TO_LOWER)]
    if any(program.placement.per_position > 1 for program in programs):  # Messages go back as well, to the next stage.
        lanes += [("activation", TO_LOWER), ("gradient", TO_HIGHER)]
    topology = programs[0].topology
    if topology.pp == 1:
        return groups
    for lane in lanes:
        for members in topology.groups(("pp",)):
            group = dist.new_group(list(members), timeout=timeout)
            if dist.get_rank() in members:
                groups[lane] = group
    return groups


def _encode(header: Header) -> Tensor:
    dtype, shape = header
    assert len(shape) <= MAX_DIMENSIONS
    padding = [0] * (MAX_DIMENSIONS - len(shape))
    return torch.tensor([DTYPES.index(dtype), len(shape), *shape, *padding], dtype=torch.int64)


def _decode(encoded: Tensor) -> Header:
    dtype, dimensions, *sizes = encoded.tolist()
    return DTYPES[dtype], tuple(sizes[:dimensions])
