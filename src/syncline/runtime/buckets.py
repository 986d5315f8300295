"""The storage behind the buckets: flat parameters, and the life of a gradient.

A gradient bucket is one flat tensor. While it is allocated every parameter's `.grad` is a view of it, set before the
backward, so that autograd accumulates each micro-batch's gradient in place: gradients are born where they are reduced
and consumed, and are never flattened or copied. A parameter that no micro-batch reaches leaves zeros.

A rank *owns* a part of each bucket, from element `owned[0]` up to `owned[1]`: all of it unless updates are sharded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

import torch
from torch import Tensor, nn

from syncline.program.actions import Part
from syncline.program.layout import Bucket

Owned = tuple[int, int]


class Storage(Enum):
    """Where a gradient bucket is in its life."""

    RELEASED = "released"
    LIVE = "live"
    REDUCING = "reducing"


class Presence(Enum):
    """What a rank has of a bucket's parameters."""

    WHOLE = "whole"
    GATHERING = "gathering"
    OWNED = "owned"
    """Only the part that it owns."""


class StorageCount:
    """Counts the bytes of one kind of storage that are alive, and their peak since the last restart."""

    def __init__(self) -> None:
        self.held = 0
        self.peak = 0

    def grow(self, size: int) -> None:
        self.held += size
        self.peak = max(self.peak, self.held)

    def shrink(self, size: int) -> None:
        self.held -= size

    def restart_peak(self) -> None:
        self.peak = self.held


class ParameterBucket:
    """The parameters of one bucket as views of one flat tensor of the parameters' dtype; padding is 0 and stays 0.

    With `divided` the rank keeps its owned part in storage of its own, and the flat tensor's storage comes and goes;
    the parameters stay views of it all the while, and so do the tensors that autograd has saved.
    """

    def __init__(
        self,
        bucket: Bucket,
        parameters: Mapping[str, nn.Parameter],
        owned: Owned | None = None,
        memory: StorageCount | None = None,
        *,
        divided: bool = False,
    ) -> None:
        self.bucket = bucket
        self.parameters = [parameters[slot.name] for slot in bucket.slots]
        self.range = owned or (0, bucket.numel)
        first = self.parameters[0]
        self.flat = torch.zeros(bucket.numel, dtype=first.dtype, device=first.device)
        """Shape (numel,)."""
        self.presence = Presence.WHOLE
        self._memory = memory or StorageCount()
        with torch.no_grad():
            for slot, parameter in zip(bucket.slots, self.parameters, strict=True):
                view = self.flat[slot.offset : slot.offset + slot.numel].view(slot.shape)
                view.copy_(parameter)
                parameter.data = view
        self._own: Tensor | None = self._owned_part.clone() if divided else None
        if divided:
            self._memory.grow(self.flat.nbytes)
            self.free()

    @property
    def owned(self) -> Tensor:
        """What the rank owns and updates, shape (owned elements,): a part of the flat tensor unless that is divided."""
        return self._owned_part if self._own is None else self._own

    @property
    def divided(self) -> bool:
        return self._own is not None

    def restore(self) -> None:
        """Give the flat tensor storage again, with the owned part in it."""
        assert self._own is not None
        assert self.presence is Presence.OWNED
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        self._owned_part.copy_(self._own)
        self._memory.grow(self.flat.nbytes)

    def free(self) -> None:
        """Drop all but the owned part."""
        assert self._own is not None
        assert self.presence is Presence.WHOLE
        self.flat.untyped_storage().resize_(0)
        self._memory.shrink(self.flat.nbytes)
        self.presence = Presence.OWNED

    @property
    def _owned_part(self) -> Tensor:
        return self.flat[self.range[0] : self.range[1]]


class GradientBucket:
    """One bucket's gradients: `allocate` -> accumulate -> reduce -> consume -> `zero` or `free`.

    With `keeps_shard` reduced gradients of the owned part add up in storage of their own, the shard, and are consumed
    there.
    """

    def __init__(
        self,
        bucket: Bucket,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        memory: StorageCount,
        owned: Owned | None = None,
        *,
        keeps_shard: bool = False,
    ) -> None:
        self.bucket = bucket
        self.parameters = list(parameters)
        self.dtype = dtype
        self.state = Storage.RELEASED
        self.range = owned or (0, bucket.numel)
        self.keeps_shard = keeps_shard
        self._memory = memory
        self._flat: Tensor | None = None
        self._shard: Tensor | None = None
        for parameter in parameters:
            parameter.grad = None
            if parameter.dtype != dtype:
                # Autograd then casts each incoming gradient and accumulates it in `dtype`, in place.
                parameter.grad_dtype = dtype

    @property
    def flat(self) -> Tensor:
        """The flat gradient, shape (numel,), of the accumulation dtype."""
        assert self._flat is not None, f"the gradients of bucket {self.bucket.id} have been released"
        return self._flat

    @property
    def owned(self) -> Tensor:
        """The owned part of the flat gradient."""
        return self.flat[self.range[0] : self.range[1]]

    @property
    def consumed(self) -> Tensor:
        """The gradient that updates the owned part, shape (owned elements,)."""
        if not self.keeps_shard:
            return self.owned
        assert self._shard is not None, f"the shard of bucket {self.bucket.id} has been released"
        return self._shard

    def allocate(self, part: Part = Part.BUCKET) -> None:
        """Give the bucket zeroed storage, and every parameter its view as `.grad`; or give the shard storage."""
        device = self.parameters[0].device
        if part is Part.SHARD:
            assert self.keeps_shard
            assert self._shard is None
            self._shard = torch.zeros(self.range[1] - self.range[0], dtype=self.dtype, device=device)
            self._memory.grow(self._shard.nbytes)
            return
        assert self.state is Storage.RELEASED
        self._flat = torch.zeros(self.bucket.numel, dtype=self.dtype, device=device)
        self._attach()
        self._memory.grow(self._flat.nbytes)
        self.state = Storage.LIVE

    def set_apart(self) -> None:
        """Let autograd make new gradients for the parameters instead of adding to the bucket, until `take_apart`."""
        for parameter in self.parameters:
            parameter.grad = None

    def take_apart(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters that got new gradients, and these; from now on gradients are added to the bucket again."""
        apart = [(p, p.grad) for p in self.parameters if p.grad is not None]
        self.set_apart()
        if self._flat is not None:
            self._attach()
        return apart

    def _attach(self) -> None:
        """Every parameter gets its view of the storage as `.grad`."""
        for slot, parameter in zip(self.bucket.slots, self.parameters, strict=True):
            parameter.grad = self.flat[slot.offset : slot.offset + slot.numel].view(slot.shape)

    def accumulate_shard(self) -> None:
        """Add the owned, reduced part to the shard."""
        assert self.state is Storage.LIVE
        self.consumed.add_(self.owned)

    def zero(self, part: Part = Part.BUCKET) -> None:
        if part is Part.SHARD:
            self.consumed.zero_()
            return
        assert self.state is Storage.LIVE
        self.flat.zero_()

    def free(self, part: Part = Part.BUCKET) -> None:
        """Drop the storage; the parameters have no gradient until the next `allocate`."""
        if part is Part.SHARD:
            self._memory.shrink(self.consumed.nbytes)
            self._shard = None
            return
        assert self.state is Storage.LIVE
        for parameter in self.parameters:
            parameter.grad = None
        self._memory.shrink(self.flat.nbytes)
        self._flat = None
        self.state = Storage.RELEASED
