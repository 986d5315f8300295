"""In which order a model's forward uses its parameters, as far as that can be known without running it for real.

Parameters are used block by block: a block is what one element of a list of modules holds (a layer), or what one module
outside of such lists holds. Every change from one block to another counts as a new place in the order.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from syncline.modeling.access.use import ParameterUse, storage_of

Uses = dict[nn.Parameter, tuple[int, int]]
"""The places of every parameter's first and last use; parameters in the order of their first uses."""

TRIAL_TOKENS = 8


def block_of(name: str) -> str:
    """The block of the parameter `name`: its path up to the first index, or else its module."""
    parts = name.split(".")
    index = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 2)
    return ".".join(parts[: index + 1])


def uses_by_registration(model: nn.Module) -> Uses:
    """As if every module were used where it is registered; right for most models."""
    return _places((block_of(name), parameter) for name, parameter in model.named_parameters(remove_duplicate=False))


def uses_in_forward(model: PreTrainedModel) -> Uses:
    """As a forward of the model on the meta device shows them.

    Where that leaves parameters out, or cannot run because what the model does depends on values, parameters are taken
    to be used where they are registered.
    """
    order = list(dict(model.named_parameters()).values())
    names = {parameter: name for name, parameter in reversed(list(model.named_parameters(remove_duplicate=False)))}
    seen: list[nn.Parameter] = []
    places = {storage_of(parameter): place for place, parameter in enumerate(order)}
    use = ParameterUse([model], places, lambda place: seen.append(order[place]), in_backward=False)
    input_ids = torch.zeros(1, TRIAL_TOKENS, dtype=torch.int64, device="meta")
    # To make a mask, transformers looks at values; some models take no other than their own.
    whole_mask = torch.zeros(1, 1, TRIAL_TOKENS, TRIAL_TOKENS, device="meta")
    try:
        for mask in (whole_mask, None):
            seen.clear()
            if _runs(model, use, input_ids, mask):
                break
    finally:
        use.forget()
    if set(seen) != set(order):
        return uses_by_registration(model)
    return _places((block_of(names[parameter]), parameter) for parameter in seen)


def _runs(model: PreTrainedModel, use: ParameterUse, input_ids: Tensor, mask: Tensor | None) -> bool:
    try:
        with torch.no_grad(), use:
            model(input_ids=input_ids, attention_mask=mask)
    except Exception:
        # Whatever such a model does with values on the way cannot be done without any.
        return False
    return True


def _places(uses: Iterable[tuple[str, nn.Parameter]]) -> Uses:
    places: Uses = {}
    place, previous = -1, None
    for block, parameter in uses:
        if block != previous:
            place, previous = place + 1, block
        places[parameter] = (places.get(parameter, (place, place))[0], place)
    return places
