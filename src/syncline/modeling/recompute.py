"""Activations that are dropped after the forward and computed again in the backward, with the same random numbers.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016); of attention alone, Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (2022), section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from syncline.errors import UserError

FULL, ATTENTION = "full", "full_attn"


def enable_recompute(model: PreTrainedModel, granularity: str = FULL, interval: int = 1) -> None:
    """Let every `interval`-th layer of `model`, counted from the first, be computed again in the backward: all of it,
    or with the granularity `full_attn` its attention.

    Raises `UserError` when the model cannot.
    """
    if granularity == ATTENTION:
        _recompute_attention(model, interval)
        return
    # Before transformers 5.21 (the last for Python 3.10 is 5.20) the method has its older name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise UserError(
            f"recompute with {type(model).__name__}",
            "transformers does not support gradient checkpointing for this model",
            "Leave recompute off",
        ) from error
    chosen = set(_layers(model, interval))
    for layer in _layers(model, 1):
        layer.gradient_checkpointing = layer in chosen
        recomputed: Callable[..., Any] = layer._gradient_checkpointing_func  # type: ignore[assignment]
        layer._gradient_checkpointing_func = _given_by_position(recomputed)  # type: ignore[assignment]


def _recompute_attention(model: PreTrainedModel, interval: int) -> None:
    found = [module for layer in _layers(model, interval) for module in _attention_in(layer)]
    if not any(_attention_in(layer) for layer in _layers(model, 1)):
        raise UserError(
            f"recompute_granularity=full_attn with {type(model).__name__}",
            "none of its layers has a module that is called attention",
            "Write recompute_granularity: full",
        )
    for module in found:
        recomputed = _given_by_position(partial(checkpoint, use_reentrant=False))
        module._gradient_checkpointing_func = recomputed  # type: ignore[assignment]
        module.forward = partial(_run_recomputed, module, module.forward)


def _run_recomputed(module: nn.Module, forward: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
    if not module.training:
        return forward(*inputs, **keywords)
    recomputed: Callable[..., Any] = module._gradient_checkpointing_func  # type: ignore[assignment]
    return recomputed(partial(forward, **keywords), *inputs)


def _given_by_position(recomputed: Callable[..., Any]) -> Callable[..., Any]:
    """`recomputed` calls a function with inputs, and will again. Here the keywords that a partial function brings, and
    what is inside tuples and the like, become inputs too: of inputs tensors are saved as autograd saves tensors, and
    can wait in host memory as these do.
    """

    def call(function: partial[Any], *inputs: Any, **options: Any) -> Any:
        values, form = tree_flatten((inputs, function.keywords))
        plain, first = function.func, function.args

        def again(*values: Any) -> Any:
            inputs, keywords = tree_unflatten(values, form)
            return plain(*first, *inputs, **keywords)

        return recomputed(again, *values, **options)

    return call


def _layers(model: nn.Module, interval: int) -> Iterator[GradientCheckpointingLayer]:
    """The layers whose number is a multiple of `interval`; a cut model keeps the numbers of the whole one."""
    for name, module in model.named_modules():
        number = name.rpartition(".")[2]
        if isinstance(module, GradientCheckpointingLayer) and number.isdecimal() and int(number) % interval == 0:
            yield module


def _attention_in(layer: nn.Module) -> list[nn.Module]:
    """The children of a layer that attend, or whatever else mixes tokens under that name."""
    return [child for child in layer.children() if "attention" in type(child).__name__.lower()]
