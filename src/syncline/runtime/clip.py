"""One norm over all parameters, one clipping factor, the same bits on every rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to the norm before dividing by it, as `torch.nn.utils.clip_grad_norm_` does."""


def squared_norm(flats: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of squares of flat gradients, accumulated in at least float32; a float64 scalar."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for flat in flats:
        dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
        total += torch.linalg.vector_norm(flat, dtype=dtype).double() ** 2
    return total


def clipping_factor(norm: Tensor, max_norm: float) -> Tensor:
    """By what gradients are multiplied so that their norm is at most `max_norm`; never above 1."""
    return (max_norm / (norm + EPSILON)).clamp(max=1.0)
