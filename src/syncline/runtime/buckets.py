"""The storage behind the buckets: flat parameters, and the life of a gradient.

A gradient bucket is one flat tensor. While it is allocated every parameter's `.grad` is a view of it, set before the
backward, so that autograd accumulates each micro-batch's gradient in place: gradients are born where they are reduced
and consumed, and are never flattened or copied. A parameter that no micro-batch reaches leaves zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import torch
from torch import Tensor, nn

from syncline.program.layout import Bucket


class Storage(Enum):
    """Where a gradient bucket is in its life."""

    RELEASED = "released"
    LIVE = "live"
    REDUCING = "reducing"


class GradientMemory:
    """Counts the bytes of gradient storage that are alive, and their peak since the last reset."""

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
    """The parameters of one bucket as views of one flat tensor of the parameters' dtype; padding is 0 and stays 0."""

    def __init__(self, bucket: Bucket, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = [parameters[slot.name] for slot in bucket.slots]
        first = self.parameters[0]
        self.flat = torch.zeros(bucket.numel, dtype=first.dtype, device=first.device)
        with torch.no_grad():
            for slot, parameter in zip(bucket.slots, self.parameters, strict=True):
                view = self.flat[slot.offset : slot.offset + slot.numel].view(slot.shape)
                view.copy_(parameter)
                parameter.data = view


class GradientBucket:
    """One bucket's gradients: `allocate` -> accumulate -> reduce -> consume -> `zero` or `free`."""

    def __init__(
        self, bucket: Bucket, parameters: list[nn.Parameter], dtype: torch.dtype, memory: GradientMemory
    ) -> None:
        self.bucket = bucket
        self.parameters = parameters
        self.dtype = dtype
        self.state = Storage.RELEASED
        self._memory = memory
        self._flat: Tensor | None = None
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
    def nbytes(self) -> int:
        return self.bucket.numel * self.dtype.itemsize

    def allocate(self) -> None:
        """Give the bucket zeroed storage, and every parameter its view as `.grad`."""
        assert self.state is Storage.RELEASED
        self._flat = torch.zeros(self.bucket.numel, dtype=self.dtype, device=self.parameters[0].device)
        for slot, parameter in zip(self.bucket.slots, self.parameters, strict=True):
            parameter.grad = self._flat[slot.offset : slot.offset + slot.numel].view(slot.shape)
        self._memory.grow(self.nbytes)
        self.state = Storage.LIVE

    def zero(self) -> None:
        assert self.state is Storage.LIVE
        self.flat.zero_()

    def free(self) -> None:
        """Drop the storage; the parameters have no gradient until the next `allocate`."""
        assert self.state is Storage.LIVE
        for parameter in self.parameters:
            parameter.grad = None
        self._flat = None
        self._memory.shrink(self.nbytes)
        self.state = Storage.RELEASED
