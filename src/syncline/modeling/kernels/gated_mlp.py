"""Gated feed-forward layers that compute `silu(gate)` again in the backward instead of keeping it.

For the gradients of `silu(gate) * up` autograd keeps `gate`, `silu(gate)` and `up`, and then the product for the
projection behind it: four activations of the intermediate size per layer, the largest in most models. The second
follows from the first for one more pass over memory, which costs no more than getting fresh memory for it.

Source of the layer: Shazeer, GLU Variants Improve Transformer, 2020 (https://arxiv.org/abs/2002.05202).
"""

from __future__ import annotations

import inspect
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_ACTIVATION = "act_fn"
_TRIAL_SIZE, _TRIAL_INTERMEDIATE_SIZE = 6, 10


def fuse_gated_mlps(model: nn.Module) -> None:
    """Replace the forward of every module of `model` that is `down_proj(silu(gate_proj(x)) * up_proj(x))`.

    A module is one if its own code says so in a trial on the CPU, in its dtype, with small random projections in the
    place of its own: output and gradients must agree in every bit. So nothing of what it computes changes. The
    activation's module is not called any more, the projections are. A backward cannot be differentiated once more.
    """
    for module in model.modules():
        if _is_candidate(module) and _is_gated_mlp(module):
            module.forward = partial(_run, module)


def _run(mlp: nn.Module, hidden_states: Tensor) -> Tensor:
    gate, up, down = (mlp.get_submodule(name) for name in _PROJECTIONS)
    return down(_GatedProduct.apply(gate(hidden_states), up(hidden_states)))


class _GatedProduct(torch.autograd.Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_gate = gradient * up
        torch.ops.aten.silu_backward(of_gate, gate, grad_input=of_gate)
        return of_gate, functional.silu(gate).mul_(gradient)


def _is_candidate(module: nn.Module) -> bool:
    names = {name for name, _ in module.named_children()}
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if names != {*_PROJECTIONS, _ACTIVATION} or own or "forward" in vars(module):
        return False
    return len(inspect.signature(module.forward).parameters) == 1


def _is_gated_mlp(module: nn.Module) -> bool:
    """Whether `module` with other projections computes what `_run` does."""
    dtype = next(module.parameters()).dtype
    generator = torch.Generator().manual_seed(0)
    try:
        trial = copy(module)
        trial._modules = {_ACTIVATION: module.get_submodule(_ACTIVATION), **_small_projections(dtype, generator)}
        input = torch.randn(3, _TRIAL_SIZE, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        wanted = (input, *trial.parameters())
        outputs = _run(trial, input), trial.forward(input)
        gradient = torch.randn(3, _TRIAL_SIZE, generator=generator, dtype=torch.float64).to(dtype)
        found, expected = ((output, *torch.autograd.grad(output, wanted, gradient)) for output in outputs)
    except Exception:
        # Whatever a module trips over is a reason to leave it alone.
        return False
    return all(map(torch.equal, found, expected))


def _small_projections(dtype: torch.dtype, generator: torch.Generator) -> dict[str, nn.Module]:
    small, large = _TRIAL_SIZE, _TRIAL_INTERMEDIATE_SIZE
    sizes = dict(zip(_PROJECTIONS, [(small, large), (small, large), (large, small)], strict=True))
    projections: dict[str, nn.Module] = {}
    for name, (inputs, outputs) in sizes.items():
        projection = nn.utils.skip_init(nn.Linear, inputs, outputs, dtype=dtype)
        for parameter in projection.parameters():
            nn.init.normal_(parameter, generator=generator)
        projections[name] = projection
    return projections
