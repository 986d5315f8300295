"""Parameters that make trouble, added to a model on the meta device: one used by some samples, one used by none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

SOMETIMES, NEVER = "used_by_some_samples", "used_by_no_sample"


def add_probes(model: PreTrainedModel) -> None:
    """Give every decoder layer both kinds of parameters.

    The first is used by the rows whose first hidden value is positive, and by none of a micro-batch in which no row's
    is: there it gets no gradient at all. Which rows these are follows from the data and the weights, so every topology
    agrees.
    """
    for layer in decoder_layers(model):
        hidden = int(model.config.get_text_config().hidden_size)
        with torch.device("meta"):
            layer.add_module(SOMETIMES, nn.Linear(hidden, hidden, bias=False))
            layer.add_module(NEVER, nn.Linear(hidden, 2, bias=False))
        layer.register_forward_hook(_use_sometimes)


def is_probe(name: str) -> bool:
    """Whether the parameter of this global name was added here."""
    return SOMETIMES in name or NEVER in name


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers in order: the list of modules that holds most parameters."""
    lists = [module for module in model.base_model.modules() if isinstance(module, nn.ModuleList)]
    layers = max(lists, key=lambda found: sum(p.numel() for p in found.parameters()))
    return list(layers)


def _use_sometimes(layer: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    rows = hidden[:, 0, 0] > 0
    if not rows.any():
        return None
    changed = hidden + rows[:, None, None] * layer.get_submodule(SOMETIMES)(hidden)
    return (changed, *output[1:]) if isinstance(output, tuple) else changed
