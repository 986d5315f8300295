"""Computing in float64 throughout, models that ask for float32 in places included.

Norms, rotary embeddings and routers of Hugging Face models cast to float32 whatever the model's dtype. In float64 this
would round away the digits that the comparison is about: the same gradient scaled before or after such a place would
differ in its eighth digit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class InFloat64(TorchFunctionMode):
    """Within this context every request for float32 gives float64."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.float:
            function = Tensor.double
        keywords = {name: _wider(value) for name, value in (kwargs or {}).items()}
        return function(*map(_wider, args), **keywords)


def recompute_in_float64(model: nn.Module) -> None:
    """Recomputation of a Hugging Face model's layers gives float64 too: it happens in backwards, which leave the mode.

    Does nothing for layers that do not recompute.
    """
    for module in model.modules():
        recompute = getattr(module, "_gradient_checkpointing_func", None)
        if recompute is not None:
            in_float64 = partial(recompute, context_fn=_recompute_contexts)
            object.__setattr__(module, "_gradient_checkpointing_func", in_float64)


def _recompute_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Around the forward, and around its repetition."""
    return nullcontext(), InFloat64()


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
