"""A use of a parameter is told before it happens, in the forward and in the backward, however it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from syncline.modeling.access.use import ParameterUse, storage_of

INPUT = torch.linspace(-1, 1, 8).view(2, 4)


class Layers(nn.Module):
    """Two layers; who uses them how is up to a test."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)


class Watched:
    """What is told of a model's parameters, each by the number of its layer, and what happens meanwhile."""

    def __init__(self, model: nn.Module | None = None, *, in_backward: bool = True) -> None:
        self.model: Any = Layers() if model is None else model
        self.happened: list[str] = []
        numbers = {
            storage_of(p): number for number, child in enumerate(self.model.children()) for p in child.parameters()
        }
        self.use = ParameterUse([self.model], numbers, self._told, in_backward=in_backward)

    def _told(self, number: int) -> None:
        self.happened.append(f"use {number}")

    def told(self, function: Callable[[Any], object]) -> list[str]:
        """What is told of `function(model)`."""
        self.happened = []
        with self.use:
            function(self.model)
        return self.happened

    def marked(self, tensor: Tensor, name: str) -> Tensor:
        """Its backward is recorded, before it runs."""
        assert tensor.grad_fn is not None
        tensor.grad_fn.register_prehook(lambda *_: self.happened.append(name))
        return tensor


# ---- In the forward --------------------------------------------------------------------------------------------------


def test_a_module_that_is_called_uses_what_it_holds_before_it_runs():
    watched = Watched(in_backward=False)
    forward = watched.model.first.forward

    def recorded(input: Tensor) -> Tensor:
        watched.happened.append("runs")
        return forward(input)

    watched.model.first.forward = recorded
    assert watched.told(lambda model: model.first(INPUT))[:2] == ["use 0", "runs"]


def test_a_module_is_told_without_the_context_too():
    """As in a recomputation, which runs in the backward."""
    watched = Watched()
    watched.model.first(INPUT)
    assert watched.happened == ["use 0"]


USES: dict[str, Callable[[Any], object]] = {
    "a product": lambda model: functional.linear(INPUT, model.second.weight),
    "an operator": lambda model: INPUT @ model.second.weight,
    "a method": lambda model: model.second.weight.sum(),
    "by keyword": lambda model: functional.linear(INPUT, weight=model.second.weight),
    "in a list": lambda model: torch.cat([INPUT, model.second.weight]),
    "in a tuple": lambda model: torch.stack((model.second.weight, model.second.weight)),
    "in place": lambda model: torch.zeros(4, 4).copy_(model.second.weight),
    "transposed": lambda model: model.second.weight.T,
    "transposed by a method": lambda model: model.second.weight.t(),
    "transposed in the last dimensions": lambda model: model.second.weight.mT,
    "its data": lambda model: model.second.weight.data,
    "detached": lambda model: model.second.weight.detach(),
    "a row": lambda model: model.second.weight[0],
    "a view": lambda model: model.second.weight.view(-1),
    "converted": lambda model: model.second.weight.double(),
}


@pytest.mark.parametrize("form", USES)
def test_whatever_is_done_with_a_parameter_uses_it(form):
    told = Watched().told(USES[form])
    assert told
    assert set(told) == {"use 1"}


LOOKS: dict[str, Callable[[Any], object]] = {
    "shape": lambda model: model.second.weight.shape,
    "size": lambda model: model.second.weight.size(0),
    "dtype": lambda model: model.second.weight.dtype,
    "device": lambda model: model.second.weight.device,
    "dim": lambda model: model.second.weight.dim(),
    "ndim": lambda model: model.second.weight.ndim,
    "numel": lambda model: model.second.weight.numel(),
    "requires_grad": lambda model: model.second.weight.requires_grad,
    "is_floating_point": lambda model: model.second.weight.is_floating_point(),
    "gradient": lambda model: model.second.weight.grad,
    "the module's parameters": lambda model: list(model.parameters()),
}


@pytest.mark.parametrize("form", LOOKS)
def test_looking_at_a_parameter_is_no_use(form):
    assert Watched().told(LOOKS[form]) == []


def test_what_does_not_touch_parameters_is_not_told():
    assert Watched().told(lambda model: (INPUT.sin() @ INPUT.T).sum()) == []


def test_functions_are_told_within_the_context_only():
    watched = Watched()
    functional.linear(INPUT, watched.model.second.weight)
    assert watched.happened == []


def test_parameters_of_no_bucket_are_not_told():
    model = Layers()
    told: list[int] = []
    use = ParameterUse([model], {storage_of(model.first.weight): 7}, told.append, in_backward=False)
    with use:
        functional.linear(model.first(INPUT), model.second.weight)
    assert set(told) == {7}


def test_a_module_whose_parameters_lie_in_several_buckets_uses_all():
    model = Layers()
    told: list[int] = []
    buckets = {storage_of(model.first.weight): 3, storage_of(model.first.bias): 1}
    ParameterUse([model], buckets, told.append, in_backward=False)
    model.first(INPUT)
    assert told == [1, 3]


def test_forget_ends_the_watch():
    watched = Watched()
    watched.use.forget()
    watched.model.second(watched.model.first(INPUT)).sum().backward()
    assert watched.happened == []
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in watched.model.modules())


# ---- In the backward -------------------------------------------------------------------------------------------------


def in_backward(watched: Watched, function: Callable[[Any], Tensor]) -> list[str]:
    """What is told in the backward of what `function(model)` returns."""
    with watched.use:
        output = function(watched.model)
    watched.happened = []
    output.sum().backward()
    return watched.happened


def test_a_module_is_used_when_the_gradient_of_its_output_arrives():
    watched = Watched()

    def both(model: Any) -> Tensor:
        hidden = watched.marked(model.first(INPUT).sin(), "sin")
        return watched.marked(model.second(hidden), "product")

    happened = in_backward(watched, both)
    assert happened.index("use 1") < happened.index("product") < happened.index("sin")
    assert [entry for entry in happened if entry == "use 0"]
    assert happened.index("sin") < happened.index("use 0")


@pytest.mark.parametrize(
    "product",
    [
        pytest.param(lambda h, w: functional.linear(h, w), id="linear"),
        pytest.param(lambda h, w: h @ w, id="operator"),
        pytest.param(lambda h, w: torch.addmm(h, h, w), id="addmm"),
        pytest.param(lambda h, w: h @ w.T, id="transposed"),
        pytest.param(lambda h, w: h @ w.view(4, 4), id="viewed"),
        pytest.param(lambda h, w: h @ w.chunk(2)[0].T, id="a part"),
        pytest.param(lambda h, w: h @ w[:, :2], id="some columns"),
    ],
)
def test_a_borrowed_weight_is_used_before_its_products_backward_reads_it(product):
    watched = Watched()

    def borrow(model: Any) -> Tensor:
        return watched.marked(product(model.first(INPUT).sin(), model.second.weight), "product")

    happened = in_backward(watched, borrow)
    assert happened.index("use 1") < happened.index("product")


class Packed(nn.Module):
    """Returns its output in some container."""

    def __init__(self, pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.pack = pack

    def forward(self, input: Tensor) -> Any:
        return self.pack(input * self.weight)


@pytest.mark.parametrize(
    ("pack", "unpack"),
    [
        (lambda t: (t, None), lambda packed: packed[0]),
        (lambda t: [t], lambda packed: packed[0]),
        (lambda t: {"hidden": (t, 3)}, lambda packed: packed["hidden"][0]),
    ],
    ids=["tuple", "list", "dict"],
)
def test_outputs_in_containers_are_followed(pack, unpack):
    watched = Watched(nn.ModuleList([Packed(pack)]))
    output = unpack(watched.model.get_submodule("0")(INPUT.clone().requires_grad_()))
    watched.happened = []
    output.sum().backward()
    assert watched.happened[0] == "use 0"


def test_nothing_is_followed_where_nobody_asks_for_it():
    watched = Watched(in_backward=False)
    assert in_backward(watched, lambda model: model.second(model.first(INPUT))) == []


def test_nothing_is_followed_without_gradients():
    watched = Watched()
    with torch.no_grad(), watched.use:
        output = watched.model.second(watched.model.first(INPUT))
    assert output.grad_fn is None
    assert watched.happened


def test_a_frozen_module_that_no_gradient_passes_is_not_followed():
    watched = Watched()
    watched.model.first.requires_grad_(False)
    assert set(in_backward(watched, lambda model: model.second(model.first(INPUT)))) == {"use 1"}


def test_a_frozen_module_that_a_gradient_passes_is_used():
    watched = Watched()
    watched.model.second.requires_grad_(False)
    assert set(in_backward(watched, lambda model: model.second(model.first(INPUT)))) == {"use 1", "use 0"}
