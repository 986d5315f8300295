"""What one forward pass of one replica consumes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

IGNORED_LABEL = -100
"""A label that carries no loss, as in `torch.nn.functional.cross_entropy`."""


@dataclass(frozen=True)
class MicroBatch:
    """Token sequences of one micro-batch. Every tensor is int64 of shape (batch, sequence)."""

    input_ids: Tensor
    labels: Tensor
    """Already shifted: `labels[b, s]` is the token that follows `input_ids[b, s]`, or `IGNORED_LABEL`."""
    position_ids: Tensor
    """A row whose positions restart holds several documents, and attention does not cross a restart."""
    attention_mask: Tensor | None = None
    """None means plain causal attention (within each document, when positions restart)."""
    counted_tokens: int | None = None
    """The number of valid labels, where it was counted before the labels went to a device."""
    packed: bool | None = None
    """What `is_packed` says, where it was seen before the positions went to a device."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        mask = () if self.attention_mask is None else (self.attention_mask,)
        return self.input_ids, self.labels, self.position_ids, *mask

    @property
    def valid_tokens(self) -> int:
        """The number of labels that carry loss. Unless counted before, reads the labels: waits for their device."""
        if self.counted_tokens is not None:
            return self.counted_tokens
        return int((self.labels != IGNORED_LABEL).sum())

    @property
    def is_packed(self) -> bool:
        """Whether any row's positions are other than 0, 1, 2, ..., as they are where a second document begins.

        Unless seen before, reads the positions: waits for their device.
        """
        if self.packed is not None:
            return self.packed
        plain = torch.arange(self.position_ids.shape[-1], device=self.position_ids.device)
        return not torch.equal(self.position_ids, plain.expand_as(self.position_ids))

    def to(self, device: torch.device) -> MicroBatch:
        """The same on `device`, its tokens counted and its positions seen on the way; from pinned memory the copy does
        not wait.
        """
        mask = self.attention_mask
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            attention_mask=None if mask is None else mask.to(device, non_blocking=True),
            counted_tokens=self.valid_tokens,
            packed=self.is_packed,
        )
