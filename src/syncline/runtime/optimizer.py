"""One fused update per bucket, on its flat tensors.

A bucket's optimizer sees one parameter: the flat one, or its fp32 master copy when parameters are kept in a smaller
dtype. The gradient's scale and the clipping factor are applied inside the fused kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from syncline.runtime.buckets import GradientBucket, ParameterBucket


@dataclass(frozen=True)
class OptimizerSettings:
    """Hyperparameters that do not change during a run; the learning rate is given with every step."""

    kind: str = "adamw"
    """`adamw` (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019) or `sgd`."""
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8


class BucketOptimizer:
    """Updates one bucket's parameters from its flat gradient."""

    def __init__(self, parameters: ParameterBucket, settings: OptimizerSettings, decay: bool) -> None:
        self._parameters = parameters
        flat = parameters.flat
        keeps_master = flat.dtype in (torch.bfloat16, torch.float16)
        self.master = nn.Parameter(flat.float() if keeps_master else flat)
        """The flat parameter that the optimizer updates, shape (numel,), float32 or float64."""
        self.optimizer = _OPTIMIZERS[settings.kind](self.master, settings, settings.weight_decay if decay else 0.0)

    @torch.no_grad()
    def step(self, gradient: GradientBucket, learning_rate: float, factor: Tensor | None) -> None:
        """Update with the bucket's gradient times `factor` (a scalar on the device; None is 1)."""
        flat = gradient.flat
        if flat.dtype != self.master.dtype:
            flat = flat.to(self.master.dtype)
        if factor is not None:
            self._apply(flat, factor)
        self.master.grad = flat
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.master.grad = None
        if self.master.dtype != self._parameters.flat.dtype:
            self._parameters.flat.copy_(self.master)

    def _apply(self, flat: Tensor, factor: Tensor) -> None:
        # The fused kernels divide by a float32 scale while they read the gradient; in float64 that would cost half the
        # digits.
        if flat.dtype == torch.float32:
            self.optimizer.grad_scale = factor.float().reciprocal()  # type: ignore[attr-defined]
            self.optimizer.found_inf = torch.zeros((), device=flat.device)  # type: ignore[attr-defined]
        else:
            flat.mul_(factor)


def _adamw(master: nn.Parameter, settings: OptimizerSettings, weight_decay: float) -> torch.optim.Optimizer:
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW([master], lr=0.0, betas=betas, eps=settings.epsilon, weight_decay=weight_decay, fused=True)


def _sgd(master: nn.Parameter, settings: OptimizerSettings, weight_decay: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([master], lr=0.0, weight_decay=weight_decay, fused=True)


_OPTIMIZERS: dict[str, Callable[[nn.Parameter, OptimizerSettings, float], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "sgd": _sgd,
}
