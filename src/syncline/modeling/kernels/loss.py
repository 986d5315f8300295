"""The loss: a sum over tokens, so that micro-batches, ranks and stages can be added up and divided once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from syncline.data.batch import IGNORED_LABEL

CHUNK_ELEMENTS = {"cpu": 2**19}
"""Logits handled at a time, by device type: on a CPU what stays in its cache."""
DEVICE_CHUNK_ELEMENTS = 2**26
"""Logits handled at a time on an accelerator, where every chunk costs kernel launches."""

_RESHAPES = {"ViewBackward0", "UnsafeViewBackward0"}
_OUTPUT_NOT_READ = {
    *("MmBackward0", "AddmmBackward0", "_AccumulatingLinearBackward"),  # Heads.
    *("MulBackward0", "DivBackward0", "ToCopyBackward0", "CloneBackward0"),  # What models do to logits afterwards.
}
"""Autograd's names of operations that make a new tensor which their backward does not read, as that of `tanh` does."""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by size in bytes."""


def token_loss_sum(logits: Tensor, labels: Tensor, *, consume_logits: bool = False) -> Tensor:
    """Sum of the cross entropies (nats) of all tokens whose label is not `IGNORED_LABEL`.

    `logits` is (..., vocabulary) in any floating dtype, `labels` int64 of shape (...). The result is a scalar in
    float32, or in float64 for float64 logits; without any valid token it and its gradient are exactly zero.

    It is computed chunk by chunk in at least float32. Between forward and backward nothing is kept but the logits
    themselves, and the backward adds only their gradient, in their own dtype; plain cross entropy also holds the
    log-probabilities.

    With `consume_logits` the caller gives the logits away. Unless the operation that computed them needs them in its
    own backward, the gradient is written over them, and the backward adds nothing. Then it can run only once: a second
    one raises `RuntimeError`.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    return _TokenLossSum.apply(rows, labels.reshape(-1), consume_logits and _is_read_by_loss_alone(rows))


class _TokenLossSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, overwrite: bool) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        rows = _rows_per_chunk(logits)
        total = torch.zeros((), dtype=dtype, device=logits.device)
        for chunk, chunk_labels in zip(logits.split(rows), labels.split(rows), strict=True):
            total += functional.cross_entropy(
                chunk.to(dtype), chunk_labels, ignore_index=IGNORED_LABEL, reduction="sum"
            )
        ctx.save_for_backward(logits, labels)
        ctx.overwrite = overwrite
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, None, None]:
        # A detached tensor shares its version with what it was detached from. So a second time autograd raises here.
        logits, labels = ctx.saved_tensors
        gradient = logits.detach() if ctx.overwrite else torch.empty_like(logits)
        rows = _rows_per_chunk(logits)
        for chunk, chunk_labels, target in zip(
            logits.split(rows), labels.split(rows), gradient.split(rows), strict=True
        ):
            _write_gradient(chunk, chunk_labels, factor, target)
        return gradient, None, None


def _is_read_by_loss_alone(logits: Tensor) -> bool:
    """Whether the operation that computed `logits` is known not to read them in its backward.

    Should any other operation have kept them, its backward raises: autograd sees that they were written over.
    """
    node = logits.grad_fn
    while node is not None and node.name() in _RESHAPES:
        node = node.next_functions[0][0]
    return node is not None and node.name() in _OUTPUT_NOT_READ


def _write_gradient(logits: Tensor, labels: Tensor, factor: Tensor, target: Tensor) -> None:
    """target = factor * (softmax(logits) - one_hot(labels)), zero where a label is ignored; `factor` is a scalar.

    `target` may be `logits`.
    """
    gradient = torch.softmax(logits, dim=-1, dtype=factor.dtype)
    label_column = labels.clamp(min=0).unsqueeze(-1)
    gradient.scatter_add_(-1, label_column, gradient.new_full((), -1).expand(label_column.shape))
    torch.mul(gradient, factor, out=target)
    _zero_rows(target, labels == IGNORED_LABEL)


def _zero_rows(values: Tensor, rows: Tensor) -> None:
    """Zero whatever a row holds, infinities included, by clearing its bits; `masked_fill_` costs a softmax."""
    bits = values.view(_BITS[values.element_size()])
    bits.bitwise_and_(rows.to(bits.dtype).sub_(1).unsqueeze(-1))


def _rows_per_chunk(logits: Tensor) -> int:
    elements = CHUNK_ELEMENTS.get(logits.device.type, DEVICE_CHUNK_ELEMENTS)
    return max(1, elements // logits.shape[-1])
