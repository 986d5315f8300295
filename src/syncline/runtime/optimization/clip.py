"""One norm over all parameters, one clipping factor, the same bits on every rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from syncline.program.layout import ALIGNMENT

EPSILON = 1e-6
"""Added to the norm before dividing by it, as `torch.nn.utils.clip_grad_norm_` does."""


def squared_norm(flats: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of squares of flat gradients, each of a multiple of `ALIGNMENT` elements; a float64 scalar.

    Squares are summed row by row in at least float32, and the rows in float64: one float32 sum over millions of
    elements would be wrong in the fourth digit.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for flat in flats:
        dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
        rows = torch.linalg.vector_norm(flat.view(-1, ALIGNMENT), dim=1, dtype=dtype)
        total += rows.double().square().sum()
    return total


def clipping_factor(norm: Tensor, max_norm: float) -> Tensor:
    """By what gradients are multiplied so that their norm is at most `max_norm`; never above 1."""
    return (max_norm / (norm + EPSILON)).clamp(max=1.0)
