"""What models do at random while they train: none of it, so that two runs can be compared."""

from __future__ import annotations

from copy import deepcopy

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedConfig

_MARKS = ("drop", "jitter")
"""Parts of the names under which configurations keep a probability or a width: `attn_pdrop`, `layerdrop`, ..."""


def without_randomness(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy with every dropout, layer drop and router jitter at 0, in nested configurations too."""
    config = deepcopy(config)
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            setattr(config, name, without_randomness(value))
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and any(mark in name for mark in _MARKS):
            setattr(config, name, type(value)(0))
    return config


def silence_dropouts(model: nn.Module) -> None:
    """Set the probability of every dropout module to 0: of those that a model builds with a number of its own."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
