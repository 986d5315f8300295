"""Weight gradients are added to the main gradient by the very operation that computes them.

Autograd would compute each weight gradient into memory of its own, then read it again to add it to `.grad`: for every
micro-batch that is the whole model written and read once more. Here a linear layer's product accumulates in place (BLAS
`beta = 1`), and an embedding adds the rows of its tokens; the layer reports no gradient to autograd, and autograd's
hooks fire as ever. What a layer has to add can also be put off, for the second half of a halved backward.

Source of the technique: the fused weight-gradient accumulation of Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

_ONEDNN = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
"""A linear layer by oneDNN: input, weight, bias, then what is done to the result: here nothing."""

MainGradient = Callable[[Tensor], Tensor]
"""Where a parameter's gradient accumulates, ready to be added to; of the parameter's shape."""
Add = Callable[[Tensor], object]
"""Adds a weight's gradient to the main gradient that it is given."""
Take = Callable[[Add], None]
DeferredGradients = list[tuple[Tensor, Add]]
"""Weights, and what is still to be added to their main gradients, in the order in which it came."""


class WeightGradients:
    """Takes from layers what they have to add to their weights' gradients: it is done at once, or put off."""

    def __init__(self, main_gradient: MainGradient) -> None:
        self._main_gradient = main_gradient
        self._deferred: DeferredGradients | None = None

    def take(self, weight: Tensor, add: Add) -> None:
        if self._deferred is None:
            add(self._main_gradient(weight))
        else:
            self._deferred.append((weight, add))

    @contextmanager
    def deferring(self) -> Iterator[DeferredGradients]:
        """Meanwhile nothing is added, and all of it is in the list."""
        self._deferred = deferred = DeferredGradients()
        try:
            yield deferred
        finally:
            self._deferred = None


def share_left_to_autograd(model: nn.Module) -> float:
    """The share of the model's parameters, by elements, whose gradients layers do not give away themselves."""
    own = {p for m in model.modules() if _gives_gradient(m) for p in m.parameters(recurse=False) if p.dim() == 2}
    every = set(model.parameters())
    return sum(p.numel() for p in every - own) / max(1, sum(p.numel() for p in every))


def _gives_gradient(module: nn.Module) -> bool:
    return type(module) is nn.Linear or (type(module) is nn.Embedding and _is_plain(module))


def accumulate_in_products(
    model: nn.Module, gradients: WeightGradients, dtype: torch.dtype, *, every_dtype: bool = False
) -> None:
    """Let every trainable plain `nn.Linear` and `nn.Embedding` of `model` give its weight's gradient to `gradients`,
    whose main gradients are of `dtype`.

    A product accumulates in the dtype of its factors, so weights of another dtype are left to autograd unless
    `every_dtype` is set, for which it pays to put their gradients off; then these are computed as autograd does it, and
    added. Subclasses are always left to autograd, for nobody knows what their forward does. So are embeddings on
    accelerators without `every_dtype`: rows are added there in no fixed order.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or not weight.requires_grad:
            continue
        if weight.dtype != dtype and not every_dtype:
            continue
        if type(module) is nn.Linear:
            module.forward = partial(_linear, module, gradients)  # type: ignore[method-assign]
        elif type(module) is nn.Embedding and _is_plain(module) and (every_dtype or weight.device.type == "cpu"):
            module.forward = partial(_embedding, module, gradients)  # type: ignore[method-assign]


def _is_plain(embedding: nn.Embedding) -> bool:
    return embedding.max_norm is None and not embedding.scale_grad_by_freq and not embedding.sparse


def _embedding(layer: nn.Embedding, gradients: WeightGradients, input: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return functional.embedding(input, layer.weight, layer.padding_idx)
    return _AccumulatingEmbedding.apply(input, layer.weight, layer.padding_idx, partial(gradients.take, layer.weight))


def _linear(layer: nn.Linear, gradients: WeightGradients, input: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return _product(input, layer.weight, layer.bias)
    # Rows go in and out: a result that is a view made inside could not be changed in place by the model.
    rows = input.reshape(-1, input.shape[-1])
    output = _AccumulatingLinear.apply(rows, layer.weight, layer.bias, partial(gradients.take, layer.weight))
    return output.view(*input.shape[:-1], output.shape[-1])


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`rows @ weight.t() + bias`; `rows` is (..., in), `weight` (out, in), `bias` (out,).

    For float32 on a CPU `functional.linear` asks the BLAS that torch was built with, which on some processors does not
    use all that they can do; oneDNN generates its kernels for the processor at hand. It is called by the operator that
    compiled models call. Not for a backward's weight gradient: it would copy the transposed gradient first.
    """
    if rows.dtype == torch.float32 and rows.device.type == "cpu" and _ONEDNN is not None:
        return _ONEDNN(rows, weight, bias, "none", [], "")
    return functional.linear(rows, weight, bias)


class _AccumulatingLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, of_weight: Take) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.of_weight = of_weight
        return _product(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        input, weight = ctx.saved_tensors
        of_input = _product(gradient, weight.t()) if ctx.needs_input_grad[0] else None
        ctx.of_weight(partial(_add_product, gradient, input))
        of_bias = gradient.sum(0) if ctx.needs_input_grad[2] else None
        return of_input, None, of_bias, None


def _add_product(gradient: Tensor, input: Tensor, main: Tensor) -> None:
    if main.dtype == gradient.dtype:
        main.addmm_(gradient.t(), input)
    else:
        main.add_(gradient.t() @ input)


class _AccumulatingEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, padding_index: int | None, of_weight: Take) -> Tensor:
        ctx.save_for_backward(input)
        ctx.padding_index = padding_index
        ctx.of_weight = of_weight
        return functional.embedding(input, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        (input,) = ctx.saved_tensors
        ctx.of_weight(partial(_add_rows, gradient, input, ctx.padding_index))
        return None, None, None, None


def _add_rows(gradient: Tensor, input: Tensor, padding_index: int | None, main: Tensor) -> None:
    if main.dtype != gradient.dtype or main.device.type != "cpu":
        padding = -1 if padding_index is None else padding_index
        main.add_(torch.ops.aten.embedding_dense_backward(gradient, input, main.shape[0], padding, False))
        return
    tokens, rows = input.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
    if padding_index is not None:
        kept = tokens != padding_index
        tokens, rows = tokens[kept], rows[kept]
    main.index_add_(0, tokens, rows)
