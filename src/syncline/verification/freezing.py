"""What is frozen in the small model: something always is, and something always is trained."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from syncline.verification.probes import decoder_layers, is_probe

FEWEST_TRAINED = 2
"""Parameters of the model itself."""


def small_patterns(patterns: Sequence[str], small: PreTrainedModel) -> tuple[str, ...]:
    """Patterns for `small` in the place of those that the user wrote for the full model: one per frozen name.

    A pattern freezes what it matches, which may be nothing: the small model has fewer layers. If fewer than
    `FEWEST_TRAINED` would be trained, the last layer is. If nothing would be frozen, the first layer's first norm
    weight is, so that every verification covers a frozen parameter.
    """
    named = list(small.named_parameters(remove_duplicate=False))
    frozen = {parameter for name, parameter in named if any(re.search(pattern, name) for pattern in patterns)}
    first_layer, *_, last_layer = decoder_layers(small)
    own = {parameter for name, parameter in named if not is_probe(name)}
    if len(own - frozen) < FEWEST_TRAINED:
        frozen -= set(last_layer.parameters())
    if not frozen:
        frozen = {_norm_weight(first_layer)}
    return tuple(f"^{re.escape(name)}$" for name, parameter in named if parameter in frozen)


def _norm_weight(layer: nn.Module) -> nn.Parameter:
    """The first parameter of one dimension, or simply the first of a layer without any."""
    parameters = list(layer.parameters())
    return next((parameter for parameter in parameters if parameter.dim() == 1), parameters[0])
