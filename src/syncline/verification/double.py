"""Computing in float64 throughout, models that ask for float32 in places included.

Norms, rotary embeddings and routers of Hugging Face models cast to float32 whatever the model's dtype. In float64 this would round
away the digits that the comparison is about: the same gradient scaled before or after such a place would differ in its eighth digit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
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


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
