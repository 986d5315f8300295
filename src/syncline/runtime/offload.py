"""What forwards save for their backwards waits in host memory.

Autograd hands over every tensor that it saves, and asks for it when a backward needs it. What moves is the storage
behind it, once, however many tensors share it. It stays on the device where something else keeps it there anyway:
parameters, buffers, tokens, what a stage has received.

On CUDA copies run on two streams of their own, one for each direction. A forward goes on while its storages leave, and
frees each one behind its copy; a backward asks for storages in about the reverse of the order in which they left, so
the ones before are on their way back while it computes. Either way no more than `UNDER_WAY_BYTES` are on the way, or
one storage. A backward that comes before a copy has ended uses what is still on the device.

Torch checks the versions of saved tensors only where no hook takes them, so that is done here as well.

Sources: of the technique, Rhu et al., "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural
Network Design" (2016); the hooks are PyTorch's `saved_tensors_hooks`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol
from weakref import finalize, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from syncline.modeling.access.use import storage_of
from syncline.runtime.buckets import StorageCount

UNDER_WAY_BYTES = 256 * 2**20
"""What copies in one direction may hold on the device. More than a bus moves in the time of one kernel, and little
beside the activations of a micro-batch for which offloading pays.
"""

SMALLEST_BYTES = {"cpu": 0}
"""Smaller storages stay, by device type. On a CPU, where nothing is gained anyway, all move, so that tests see it."""
SMALLEST_ON_DEVICE = 2**18
"""On an accelerator: about what a bus moves in the time that it takes to start a copy."""


class Copy(Protocol):
    """A copy that has been started."""

    def is_done(self) -> bool:
        """Whether it has ended. The host does not wait."""

    def wait(self) -> None:
        """What the device does from now on comes after it."""


class Lane(Protocol):
    """Copies in one direction, one after the other."""

    def copy(self, target: Tensor, source: Tensor) -> Copy:
        """Starts behind what the device has been told to do until now."""


class Offload:
    """Moves to host memory what the forwards of one rank save, and back what their backwards ask for."""

    def __init__(
        self,
        device: torch.device,
        residents: Iterable[Tensor],
        *,
        leaving: Lane | None = None,
        coming: Lane | None = None,
    ) -> None:
        """The storages of `residents` never move. The lanes are by default those of the device."""
        self._device = torch.empty(0, device=device).device  # With its number.
        self._on_cuda = device.type == "cuda"
        self._residents = {storage_of(tensor) for tensor in residents}
        self._smallest = SMALLEST_BYTES.get(device.type, SMALLEST_ON_DEVICE)
        self._to_host = leaving or _lane_of(device)
        self._to_device = coming or _lane_of(device)
        self._leaving: deque[_Leaving] = deque()
        self._leaving_bytes = 0
        self._coming: deque[_Coming] = deque()
        self._fetched = 0
        self.memory = StorageCount()
        """The bytes that wait in host memory."""

    @contextmanager
    def taking(self, kept: Iterable[Tensor] = ()) -> Iterator[None]:
        """What is saved meanwhile moves, but for what somebody has `kept` on the device until the backward."""
        stays = self._residents | {storage_of(tensor) for tensor in kept}
        saved_by = _SavedByForward()
        known: dict[tuple[int, int], tuple[StorageWeakRef, ref[_Moved]]] = {}

        def pack(tensor: Tensor) -> _Stayed | _Saved:
            storage = storage_of(tensor)
            if storage in stays or not self._can_move(tensor):
                # Not the tensor itself: the output of an operation would keep the operation, and that the output.
                return _Stayed(tensor.detach(), tensor._version)
            # Its address stands for a storage as long as somebody refers to it, if only weakly.
            key = storage, tensor._version
            moved = known[key][1]() if key in known else None
            if moved is None:
                moved = self._move(tensor.detach(), saved_by)
                known[key] = StorageWeakRef(tensor.untyped_storage()), ref(moved)
            return _Saved(moved, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

        with saved_tensors_hooks(pack, self._unpack):
            yield
        saved_by.next = len(saved_by.moved) - 1

    def settle(self, *, everything: bool = False) -> None:
        """Let go of what has been copied, and of what is too much to be on the way; or of everything, for which the
        device waits.
        """
        while self._leaving:
            first = self._leaving[0]
            too_much = self._leaving_bytes > UNDER_WAY_BYTES and len(self._leaving) > 1
            if not (everything or too_much or first.copy.is_done()):
                break
            first.copy.wait()
            self._leaving.popleft()
            self._leaving_bytes -= first.bytes
            moved = first.moved()
            if moved is not None and moved.original is not None:
                _require_unchanged(moved.original, moved.version)
                moved.original = None
        while self._coming and (everything or self._coming[0].copy.is_done()):
            self._coming.popleft().copy.wait()

    def _can_move(self, tensor: Tensor) -> bool:
        # Of a subclass nobody knows what else belongs to it.
        return (
            type(tensor) in (Tensor, torch.nn.Parameter)
            and tensor.layout is torch.strided
            and tensor.device == self._device
            and not (tensor.is_conj() or tensor.is_neg())
            and tensor.untyped_storage().nbytes() >= max(1, self._smallest)
        )

    def _move(self, original: Tensor, saved_by: _SavedByForward) -> _Moved:
        source = _bytes(original.untyped_storage())
        host = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=self._on_cuda)
        moved = _Moved(original, original._version, host, saved_by, len(saved_by.moved))
        saved_by.put(moved)
        self.memory.grow(host.nbytes)
        finalize(moved, self.memory.shrink, host.nbytes)
        self._leaving.append(_Leaving(ref(moved), original, host.nbytes, self._to_host.copy(host, source)))
        self._leaving_bytes += host.nbytes
        self.settle()
        return moved

    def _unpack(self, saved: _Stayed | _Saved) -> Tensor:
        if isinstance(saved, _Stayed):
            _require_unchanged(saved.tensor, saved.version)
            return saved.tensor
        moved = saved.moved
        here = self._brought_here(moved)
        self._fetch_ahead(moved)
        self.settle()  # What will be needed soon has been taken hold of before.
        if moved.arrival is not None:
            moved.arrival.copy.wait()
            while self._coming and self._coming[0].number <= moved.arrival.number:
                self._coming.popleft()  # What set off before it has arrived as well.
            moved.arrival = None
        # A view, so that a change in place of what is handed out here shows when it is asked for again.
        _require_unchanged(here, moved.version, saved.size)
        elements = here[: here.numel() // saved.dtype.itemsize * saved.dtype.itemsize].view(saved.dtype)
        return elements.as_strided(saved.size, saved.stride, saved.offset)

    def _brought_here(self, moved: _Moved) -> Tensor:
        """Its bytes on the device, on their way back if they have left it."""
        if moved.here is None and moved.original is not None:
            _require_unchanged(moved.original, moved.version)
            moved.here = _bytes(moved.original.untyped_storage())
            moved.original = None
        elif moved.here is None:
            moved.here = torch.empty(moved.host.numel(), dtype=torch.uint8, device=self._device)
            moved.arrival = _Coming(self._fetched, moved.here, self._to_device.copy(moved.here, moved.host))
            self._fetched += 1
            self._coming.append(moved.arrival)
        else:
            return moved.here
        moved.version = moved.here._version
        return moved.here

    def _fetch_ahead(self, moved: _Moved) -> None:
        """Of what left before `moved`, the latest; unless `moved` itself comes before its turn."""
        saved_by = moved.saved_by
        while saved_by.next > moved.index and saved_by.moved[saved_by.next]() is None:
            saved_by.next -= 1  # No backward has asked for it, and none will.
        if saved_by.next > moved.index:
            return
        saved_by.next = min(saved_by.next, moved.index - 1)
        while saved_by.next >= 0 and saved_by.bytes_between(saved_by.next, moved.index) < UNDER_WAY_BYTES:
            coming = saved_by.moved[saved_by.next]()
            if coming is not None:
                self._brought_here(coming)
            saved_by.next -= 1


@dataclass(frozen=True)
class _Stayed:
    """What autograd keeps in the place of a tensor that did not move."""

    tensor: Tensor
    version: int


@dataclass(frozen=True)
class _Saved:
    """What autograd keeps in the place of a tensor whose storage has moved: that, and its view of it."""

    moved: _Moved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """In elements."""


@dataclass(eq=False)
class _Moved:
    """One storage; it lives as long as autograd keeps a tensor that it is behind."""

    original: Tensor | None
    """A tensor that it is behind, until it has been copied or is wanted again."""
    version: int
    """Of `original`, then of `here`."""
    host: Tensor
    """Its bytes, shape (bytes,)."""
    saved_by: _SavedByForward
    index: int
    """Among what its forward has moved."""
    here: Tensor | None = None
    """Its bytes on the device again, shape (bytes,)."""
    arrival: _Coming | None = None
    """What is still to be waited for before these are read."""


@dataclass(eq=False)
class _SavedByForward:
    """What one forward has moved, in order."""

    moved: list[ref[_Moved]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """The bytes up to and with each of them."""
    next: int = -1
    """The latest that has not been fetched."""

    def put(self, moved: _Moved) -> None:
        self.ends.append((self.ends[-1] if self.ends else 0) + moved.host.nbytes)
        self.moved.append(ref(moved))

    def bytes_between(self, first: int, last: int) -> int:
        """Of what stands between two indices, without both."""
        return self.ends[last - 1] - self.ends[first]


@dataclass(frozen=True)
class _Leaving:
    """A storage that must not be used for anything else before it has been copied."""

    moved: ref[_Moved]
    original: Tensor
    bytes: int
    copy: Copy


@dataclass(frozen=True)
class _Coming:
    """Memory on the device that must not be used for anything else before the bytes have arrived."""

    number: int
    here: Tensor
    copy: Copy


class _Done:
    """A copy that had ended when it was asked for."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _Immediate:
    def copy(self, target: Tensor, source: Tensor) -> Copy:
        target.copy_(source)
        return _Done()


@dataclass(frozen=True)
class _OnStream:
    end: torch.cuda.Event

    def is_done(self) -> bool:
        return self.end.query()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.end)


class _CudaLane:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def copy(self, target: Tensor, source: Tensor) -> Copy:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            end = torch.cuda.Event()
            end.record()
        return _OnStream(end)


def _lane_of(device: torch.device) -> Lane:
    return _CudaLane(device) if device.type == "cuda" else _Immediate()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _require_unchanged(tensor: Tensor, version: int, size: torch.Size | None = None) -> None:
    """What autograd itself checks of tensors that no hook takes; `size` is that of the one whose bytes `tensor` has."""
    if tensor._version != version:
        shape = tuple(tensor.shape if size is None else size)
        raise RuntimeError(
            f"a tensor of shape {shape} was changed in place behind the operation that saved it for its backward, so "
            "this model's gradients would be wrong. Without offload_activations autograd says which "
            "operation it was."
        )
