"""RMS norms whose backward is one formula that needs the input, the weight and one number per row.

Hugging Face models spell this norm out: casts, square, mean, root, two products. Autograd then keeps the normalised
input beside the input, and its backward goes through memory of that size once for each of these operations, and again
to add up what they yield. PyTorch has a kernel for all of it, but not for CPUs: there `torch.nn.functional.rms_norm`
spells the norm out as well. Here the output comes from the model's operations, the gradients from the formula.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019 (https://arxiv.org/abs/1910.07467).
"""

from __future__ import annotations

import inspect
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

_EPSILON_NAMES = ("variance_epsilon", "eps")
_TRIAL_SCALES = (0.0, 1e-4, 1e-2, 1.0, 1e2)
"""Root mean squares of the rows in a trial's input; in the small ones epsilon shows."""
_GRADIENT_TOLERANCE = 256
"""In units of the dtype's precision, relative to the largest gradient of a row."""


def fuse_norms(model: nn.Module) -> None:
    """Replace the forward of every module of `model` that is a plain RMS norm over the last dimension.

    A module is one if its own code says so in a trial on the CPU, with random input and a random weight: the output
    must be `weight * (x * rsqrt(mean(x ** 2) + epsilon))` in every bit, and the gradients its gradients. Norms that
    weight by `1 + weight` or take more than their input are left alone; so are all weights of less than float32, where
    models round the normalised input before they weight it, and each in its way.

    On the CPU the output keeps every bit and gradients differ by rounding; elsewhere `torch.nn.functional.rms_norm`
    takes over and both do. Modules must not be on the meta device. A backward cannot be differentiated once more.
    """
    for module in model.modules():
        epsilon = _epsilon_of_candidate(module)
        if epsilon is not None and _is_rms_norm(module, epsilon):
            module.forward = partial(_normalise, module, epsilon)


def _normalise(norm: nn.Module, epsilon: float, hidden_states: Tensor) -> Tensor:
    weight = norm.weight
    assert isinstance(weight, Tensor)
    if hidden_states.dtype != weight.dtype:
        return type(norm).forward(norm, hidden_states)
    if hidden_states.device.type != "cpu":
        return functional.rms_norm(hidden_states, weight.shape, weight, epsilon)
    return _RmsNorm.apply(hidden_states, weight, epsilon)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        squares = input * input
        scale = squares.mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        ctx.save_for_backward(input, weight, scale)
        return torch.mul(input, scale, out=squares).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """With y = w x s and s = rsqrt(mean(x²) + epsilon): dw = Σ s x dy over rows, and in each of them
        dx = s w dy - x s³ mean(x w dy).
        """
        input, weight, scale = ctx.saved_tensors
        size = weight.numel()
        rows, gradients, scales = input.reshape(-1, size), gradient.reshape(-1, size), scale.reshape(-1, 1)
        products = rows * gradients
        of_weight = products.t() @ scales.squeeze(-1)
        towards_input = (products @ weight).unsqueeze(-1).mul_(scales.pow(3).div_(-size))
        of_input = torch.mul(gradients, weight, out=products).mul_(scales).addcmul_(rows, towards_input)
        return of_input.view(input.shape), of_weight, None


def _epsilon_of_candidate(module: nn.Module) -> float | None:
    """The epsilon of a module that may be an RMS norm; None for every other one."""
    state = [*module.named_children(), *module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    if [name for name, _ in state] != ["weight"] or "forward" in vars(module):
        return None
    weight = state[0][1]
    assert isinstance(weight, Tensor)
    takes_one_argument = len(inspect.signature(module.forward).parameters) == 1
    if weight.dim() != 1 or weight.dtype not in (torch.float32, torch.float64) or not takes_one_argument:
        return None
    values = (getattr(module, name, None) for name in _EPSILON_NAMES)
    return next((value for value in values if isinstance(value, float)), None)


def _is_rms_norm(module: nn.Module, epsilon: float) -> bool:
    """Whether a copy of `module` computes on random numbers what `_RmsNorm` does."""
    generator = torch.Generator().manual_seed(0)
    weight = module.get_parameter("weight").detach()
    shape = (len(_TRIAL_SCALES), weight.numel())
    input, gradient = (torch.randn(shape, generator=generator, dtype=weight.dtype) for _ in range(2))
    input.mul_(torch.tensor(_TRIAL_SCALES, dtype=weight.dtype).unsqueeze(-1)).requires_grad_()
    try:
        trial = deepcopy(module).cpu()
        trial.weight = nn.Parameter(torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
        expected = trial.forward(input)
        found = _RmsNorm.apply(input, trial.weight, epsilon)
        pairs = zip(
            torch.autograd.grad(found, (input, trial.weight), gradient),
            torch.autograd.grad(expected, (input, trial.weight), gradient),
            strict=True,
        )
    except Exception:
        # Whatever a module trips over is a reason to leave it alone.
        return False
    return torch.equal(found, expected) and all(_agree(*pair) for pair in pairs)


def _agree(found: Tensor, expected: Tensor) -> bool:
    tolerance = _GRADIENT_TOLERANCE * torch.finfo(expected.dtype).eps
    return bool(((found - expected).abs().amax(-1) <= tolerance * expected.abs().amax(-1)).all())
