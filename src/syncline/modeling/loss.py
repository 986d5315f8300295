"""The loss: a sum over tokens, so that micro-batches, ranks and stages can be added up and divided once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from syncline.modeling.batch import IGNORED_LABEL

CHUNK_ELEMENTS = {"cpu": 2**19}
"""Logits handled at a time, by device type: on a CPU what stays in its cache."""
DEVICE_CHUNK_ELEMENTS = 2**26
"""Logits handled at a time on an accelerator, where every chunk costs kernel launches."""


def token_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross entropies (nats) of all tokens whose label is not `IGNORED_LABEL`.

    `logits` is (..., vocabulary) in any floating dtype, `labels` int64 of shape (...). The result is a scalar in
    float32, or in float64 for float64 logits; without any valid token it and its gradient are exactly zero.

    It is computed chunk by chunk in at least float32. Between forward and backward nothing is kept but the logits
    themselves, and the backward adds only their gradient, in their own dtype; plain cross entropy also holds the
    log-probabilities.
    """
    return _TokenLossSum.apply(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


class _TokenLossSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        rows = _rows_per_chunk(logits)
        total = torch.zeros((), dtype=dtype, device=logits.device)
        for chunk, chunk_labels in zip(logits.split(rows), labels.split(rows), strict=True):
            total += functional.cross_entropy(
                chunk.to(dtype), chunk_labels, ignore_index=IGNORED_LABEL, reduction="sum"
            )
        ctx.save_for_backward(logits, labels)
        return total

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, None]:
        logits, labels = ctx.saved_tensors
        rows = _rows_per_chunk(logits)
        gradient = torch.empty_like(logits)
        for chunk, chunk_labels, target in zip(
            logits.split(rows), labels.split(rows), gradient.split(rows), strict=True
        ):
            _write_gradient(chunk, chunk_labels, factor, target)
        return gradient, None


def _write_gradient(logits: Tensor, labels: Tensor, factor: Tensor, target: Tensor) -> None:
    """target = factor * (softmax(logits) - one_hot(labels)), zero where a label is ignored; `factor` is a scalar."""
    exact = target if target.dtype == factor.dtype else torch.empty_like(target, dtype=factor.dtype)
    torch.softmax(logits, dim=-1, dtype=factor.dtype, out=exact)
    label_column = labels.clamp(min=0).unsqueeze(-1)
    exact.scatter_add_(-1, label_column, exact.new_full((), -1).expand(label_column.shape))
    _zero_rows(exact.mul_(factor), labels == IGNORED_LABEL)
    if exact is not target:
        target.copy_(exact)


def _zero_rows(values: Tensor, rows: Tensor) -> None:
    """Zero whatever a row holds, infinities included, by clearing its bits; `masked_fill_` costs a softmax."""
    bits = values.view(torch.int64 if values.dtype == torch.float64 else torch.int32)
    bits.bitwise_and_(rows.to(bits.dtype).sub_(1).unsqueeze(-1))


def _rows_per_chunk(logits: Tensor) -> int:
    elements = CHUNK_ELEMENTS.get(logits.device.type, DEVICE_CHUNK_ELEMENTS)
    return max(1, elements // logits.shape[-1])
