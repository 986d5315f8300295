"""Who uses which parameters, noticed when it happens: the moment at which they must be there.

A module that is called uses the parameters that it holds itself. Some models also use a parameter that another module
holds (an embedding's matrix as the head, a convolution's weight by itself); such a use is seen where the parameter
enters a function of PyTorch. In a backward, parameters are used once the gradient of what came from them arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

Use = Callable[[int], None]
"""Told the bucket whose parameters are about to be used."""

_LOOKS = frozenset(
    {
        *("size", "dim", "ndimension", "numel", "stride", "element_size", "is_floating_point", "is_complex"),
        *("is_contiguous", "untyped_storage", "data_ptr", "register_hook", "requires_grad_"),
    }
)
"""Methods that look at a parameter without reading its values."""
_ALIASES = frozenset({"data", "T", "mT", "H", "mH", "real"})
"""Attributes that are another name for a parameter's values; other attributes look at it only."""


class ParameterUse(TorchFunctionMode):
    """Within this context every use of a parameter is told; entered around each forward, and around each backward that
    may compute some of it again.
    """

    def __init__(
        self, models: Iterable[nn.Module], bucket_of: Mapping[int, int], use: Use, *, in_backward: bool
    ) -> None:
        """`bucket_of` maps the `storage_of` parameters to their bucket; with `in_backward` uses in backwards are told
        too.
        """
        super().__init__()
        self._bucket_of = bucket_of
        self._use = use
        self._in_backward = in_backward
        self._telling = False
        self._hooks: list[RemovableHandle] = []
        for module in (module for model in models for module in model.modules()):
            buckets = {bucket_of.get(storage_of(parameter)) for parameter in module.parameters(recurse=False)} - {None}
            if buckets:
                self._watch(module, sorted(bucket for bucket in buckets if bucket is not None))

    def __torch_function__(
        self, function: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        keywords = kwargs or {}
        # What is done about a use handles the parameters' storage itself.
        looks = self._telling or _only_looks(function)
        buckets = [] if looks else list(dict.fromkeys(self._buckets_in((*args, *keywords.values()))))
        self._tell(buckets)
        result = function(*args, **keywords)
        if buckets:
            self._follow_backward(result, buckets)
        return result

    def forget(self) -> None:
        """Stop watching the models' modules."""
        for hook in self._hooks:
            hook.remove()

    def _watch(self, module: nn.Module, buckets: Sequence[int]) -> None:
        def before(module: nn.Module, inputs: Any) -> None:
            self._tell(buckets)

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            self._follow_backward(output, buckets)

        self._hooks.append(module.register_forward_pre_hook(before))
        if self._in_backward:
            self._hooks.append(module.register_forward_hook(after))

    def _tell(self, buckets: Sequence[int]) -> None:
        if self._telling:
            return
        self._telling = True
        try:
            for bucket in buckets:
                self._use(bucket)
        finally:
            self._telling = False

    def _follow_backward(self, output: Any, buckets: Sequence[int]) -> None:
        if not self._in_backward or not torch.is_grad_enabled():
            return

        def use(gradient: Tensor) -> None:
            self._tell(buckets)

        for tensor in _tensors(output):
            # The backward of a view reads nothing; what is computed from it is followed by itself.
            if tensor.requires_grad and not tensor.is_leaf and storage_of(tensor) not in self._bucket_of:
                tensor.register_hook(use)

    def _buckets_in(self, values: Sequence[Any]) -> Iterator[int]:
        for tensor in _tensors(values):
            # Not the tensor itself: views of a parameter are its values too.
            bucket = self._bucket_of.get(storage_of(tensor))
            if bucket is not None:
                yield bucket


def run_backward(output: GradientEdge, gradient: Tensor) -> None:
    """Add the gradients of an output, given its own, to those of the parameters; `output` is where its way back begins.

    `torch.autograd.backward` leaves every context such as `ParameterUse` before it runs; this does not.
    """
    _engine_run_backward((output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def storage_of(tensor: Tensor) -> int:
    """What tells a tensor's storage from every other, whatever is in it; 0 for tensors without one."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def _only_looks(function: Callable[..., Any]) -> bool:
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return getattr(getattr(function, "__self__", None), "__name__", "") not in _ALIASES
    return name == "__set__" or name in _LOOKS


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
