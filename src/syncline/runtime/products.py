"""Weight gradients of linear layers are added to the main gradient by the very matrix product that computes them.

Autograd would compute each weight gradient into memory of its own, then read it again to add it to `.grad`: for every
micro-batch that is the whole model written and read once more. Here the product's result is accumulated in place (BLAS
`beta = 1`), the layer reports no gradient to autograd, and autograd's hooks fire as ever.

Source of the technique: the fused weight-gradient accumulation of Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

MainGradient = Callable[[Tensor], Tensor]
"""Where a parameter's gradient accumulates, ready to be added to; of the parameter's shape."""


def accumulate_in_products(model: nn.Module, main_gradient: MainGradient, dtype: torch.dtype) -> None:
    """Let every trainable plain `nn.Linear` of `model` add its weight gradient to `main_gradient(weight)` itself.

    Only where weights have the main gradients' `dtype`: a product accumulates in the dtype of its factors. Subclasses
    are left to autograd, for nobody knows what their forward does.
    """
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.requires_grad and module.weight.dtype == dtype:
            module.forward = partial(_linear, module, main_gradient)  # type: ignore[method-assign]


def _linear(layer: nn.Linear, main_gradient: MainGradient, input: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return functional.linear(input, layer.weight, layer.bias)
    return _AccumulatingLinear.apply(input, layer.weight, layer.bias, partial(main_gradient, layer.weight))


class _AccumulatingLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, of_weight: Callable[[], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.of_weight = of_weight
        return functional.linear(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        input, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_input = gradient @ weight if ctx.needs_input_grad[0] else None
        ctx.of_weight().addmm_(rows.t(), input.reshape(-1, input.shape[-1]))
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return of_input, None, of_bias, None
