"""The gradients of layers that accumulate inside their products are autograd's."""

from __future__ import annotations

from copy import deepcopy
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from syncline.modeling.kernels.linear import WeightGradients, accumulate_in_products
from syncline.program.actions import AllocateGradients, Backward
from syncline.program.layout import ALIGNMENT, Bucket, Slot
from syncline.runtime.backward_hooks import GradientQueue
from syncline.runtime.buckets import GradientBucket, StorageCount

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}
"""Relative to the largest value of the gradient."""


def two_layers(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=bias), nn.Tanh(), nn.Linear(8, 5, bias=bias)).to(dtype)


ModelType = TypeVar("ModelType", bound=nn.Module)


def accumulating(model: ModelType) -> tuple[ModelType, list[Tensor]]:
    """A copy whose products accumulate into `.grad`, which is there before the first backward; and the list of weights
    that grows with every such product.
    """
    model = deepcopy(model)
    products: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)

    def main_gradient(parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        products.append(parameter)
        return parameter.grad

    accumulate_in_products(model, WeightGradients(main_gradient), next(model.parameters()).dtype)
    return model, products


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def backward(model: nn.Module, input: Tensor) -> Tensor:
    """Accumulates the gradients of a loss that depends on every output differently; returns the input's."""
    input = input.clone().requires_grad_()
    output = model(input)
    (output * torch.linspace(-1, 2, output.numel(), dtype=output.dtype).view(output.shape)).square().sum().backward()
    assert input.grad is not None
    return input.grad


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        assert (found[name] - gradient).abs().max() <= tolerance * gradient.abs().max(), name


@pytest.mark.parametrize("shape", [(7, 6), (2, 7, 6)], ids=["2-D", "3-D"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_gradients_are_those_of_autograd(dtype, bias, shape):
    plain = two_layers(dtype, bias=bias)
    model, products = accumulating(plain)
    of_input = backward(model, inputs(shape, dtype))
    expected_of_input = backward(plain, inputs(shape, dtype))
    assert len(products) == 2
    assert_close(
        {"input": of_input, **gradients(model)},
        {"input": expected_of_input, **gradients(plain)},
        TOLERANCES[dtype],
    )


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize(
    "input",
    [
        inputs((7, 6), torch.float32),
        inputs((6, 7), torch.float32).t(),
        inputs((7, 12), torch.float32)[:, ::2],
        inputs((1, 6), torch.float32).expand(7, 6),
    ],
    ids=["rows", "columns", "every other", "one row for all"],
)
def test_products_in_float32_take_any_layout_with_onednn_and_without(monkeypatch, input, onednn):
    if not onednn:
        monkeypatch.setattr("syncline.modeling.kernels.linear._ONEDNN", None)
    model, _ = accumulating(two_layers(torch.float32))
    exact = two_layers(torch.float64)
    expected = exact(input.double())
    assert_close({"output": model(input).detach().double()}, {"output": expected.detach()}, 1e-6)
    # The gradient of a sum is one number, expanded.
    model(input).sum().backward()
    expected.sum().backward()
    assert_close({name: gradient.double() for name, gradient in gradients(model).items()}, gradients(exact), 1e-6)


def test_a_product_of_no_rows_is_empty():
    model, _ = accumulating(two_layers(torch.float32))
    output = model(torch.zeros(0, 6))
    assert output.shape == (0, 5)
    output.sum().backward()
    assert all(not gradient.any() for gradient in gradients(model).values())


def test_micro_batches_accumulate_in_place():
    plain = two_layers()
    model, _ = accumulating(plain)
    places = {name: gradient.data_ptr() for name, gradient in gradients(model).items()}
    for seed in range(3):
        backward(model, inputs((2, 7, 6), seed=seed))
        backward(plain, inputs((2, 7, 6), seed=seed))
    assert {name: gradient.data_ptr() for name, gradient in gradients(model).items()} == places
    assert_close(gradients(model), gradients(plain), 1e-12)


def test_a_frozen_weight_is_left_alone_and_passes_the_gradient_on():
    plain = two_layers()
    plain[2].weight.requires_grad_(False)
    model, products = accumulating(plain)
    of_input = backward(model, inputs((7, 6)))
    assert_close({"input": of_input}, {"input": backward(plain, inputs((7, 6)))}, 1e-12)
    assert len(products) == 1
    assert model[2].weight.grad is None
    assert_close(gradients(model), gradients(plain), 1e-12)


def test_subclasses_are_left_to_autograd():
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return functional.linear(input, 2 * self.weight, self.bias)

    plain = nn.Sequential(Doubled(6, 5)).double()
    model, products = accumulating(plain)
    backward(model, inputs((7, 6)))
    backward(plain, inputs((7, 6)))
    assert products == []
    assert_close(gradients(model), gradients(plain), 1e-12)


def test_weights_of_another_dtype_than_the_gradients_are_left_to_autograd():
    model = two_layers(torch.bfloat16)
    forward = model[0].forward
    accumulate_in_products(model, WeightGradients(lambda parameter: pytest.fail("no product")), torch.float32)
    assert model[0].forward == forward
    backward(model, inputs((7, 6), torch.bfloat16))


def test_without_gradients_the_output_is_the_same_and_nothing_is_kept():
    plain = two_layers()
    model, _ = accumulating(plain)
    with torch.no_grad():
        output = model(inputs((7, 6)))
        assert torch.equal(output, plain(inputs((7, 6))))
    assert not output.requires_grad
    assert torch.equal(model(inputs((7, 6))).detach(), output)


class Tied(nn.Module):
    """An embedding whose weight is the head's as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6, dtype=torch.float64)
        self.head = nn.Linear(6, 11, bias=False, dtype=torch.float64)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).sin())


def test_a_tied_embedding_and_head_add_to_one_gradient():
    plain = Tied()
    model, products = accumulating(plain)
    tokens = torch.randint(0, 11, (2, 9), generator=torch.Generator().manual_seed(3))
    for one in (plain, model):
        one(tokens).square().sum().backward()
    assert len(products) == 2
    assert_close(gradients(model), gradients(plain), 1e-12)


TOKENS = torch.tensor([[3, 1, 3, 0], [7, 3, 1, 0]])
"""Some come several times, some never."""


def embed(model: nn.Module, tokens: Tensor = TOKENS) -> None:
    """Accumulates the gradients of a loss that depends on every output differently."""
    output = model(tokens)
    (output * torch.linspace(-1, 2, output.numel(), dtype=output.dtype).view(output.shape)).square().sum().backward()


@pytest.mark.parametrize("padding", [None, 0, 3, -1])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_an_embedding_adds_the_rows_of_its_tokens(dtype, padding):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(9, 5, padding_idx=padding, dtype=dtype))
    model, products = accumulating(plain)
    place = gradients(model)["0.weight"].data_ptr()
    for tokens in (TOKENS, TOKENS.flip(1) + 1):
        embed(model, tokens)
        embed(plain, tokens)
    assert len(products) == 2
    assert gradients(model)["0.weight"].data_ptr() == place
    assert_close(gradients(model), gradients(plain), TOLERANCES[dtype])
    assert (gradients(model)["0.weight"][6] == 0).all(), "a token that never comes"


def test_a_gradient_of_an_embedding_has_the_same_bits_in_every_run():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(9, 5))
    found = []
    for _ in range(2):
        model, _ = accumulating(plain)
        embed(model)
        found.append(gradients(model)["0.weight"])
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "options",
    [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}],
    ids=lambda options: next(iter(options)),
)
def test_embeddings_that_do_more_than_look_up_are_left_to_autograd(options):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(9, 5, dtype=torch.float64, **options))
    forward = plain[0].forward
    accumulate_in_products(plain, WeightGradients(lambda parameter: pytest.fail("no product")), torch.float64)
    assert plain[0].forward == forward


def test_a_frozen_embedding_is_left_alone():
    plain = Tied()
    plain.embedding.weight.requires_grad_(False)
    model, products = accumulating(plain)
    assert not model(TOKENS).requires_grad
    assert products == []


def test_an_embedding_without_gradients_is_the_same():
    plain = nn.Sequential(nn.Embedding(9, 5, padding_idx=0))
    model, products = accumulating(plain)
    with torch.no_grad():
        assert torch.equal(model(TOKENS), plain(TOKENS))
    assert torch.equal(model(TOKENS), plain(TOKENS))
    assert products == []


def test_recomputed_layers_accumulate_once():
    plain = two_layers()
    model, products = accumulating(plain)
    input = inputs((2, 7, 6)).requires_grad_()
    checkpoint(model, input, use_reentrant=False).square().sum().backward()
    plain(inputs((2, 7, 6))).square().sum().backward()
    assert len(products) == 2
    assert_close(gradients(model), gradients(plain), 1e-12)


def test_the_first_product_allocates_released_storage_and_hooks_fire_after_the_last():
    plain = two_layers(bias=False)
    model = deepcopy(plain)
    names = [name for name, _ in model.named_parameters()]
    slots = tuple(Slot(n, tuple(p.shape), ALIGNMENT * i) for i, (n, p) in enumerate(model.named_parameters()))
    bucket = GradientBucket(
        Bucket(0, 0, slots, ALIGNMENT * len(slots)),
        list(model.parameters()),
        torch.float64,
        StorageCount(),
    )
    queue = GradientQueue(lambda action: bucket.allocate())
    queue.watch(bucket)

    def main_gradient(parameter: Tensor) -> Tensor:
        queue.allocate_now(0)
        assert parameter.grad is not None
        return parameter.grad

    accumulate_in_products(model, WeightGradients(main_gradient), torch.float64)
    seen: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda parameter, name=name: seen.update({name: parameter.grad.clone()})
        )
    output = model(inputs((7, 6)))
    assert all(parameter.grad is None for parameter in model.parameters())
    queue.arm([AllocateGradients(0, during=Backward(0, 0))], {0: len(bucket.parameters)})
    output.square().sum().backward()
    queue.finish()
    plain(inputs((7, 6))).square().sum().backward()
    assert list(seen) == names[::-1]
    assert_close(seen, gradients(plain), 1e-12)
    assert_close(gradients(model), gradients(plain), 1e-12)
    for slot in slots:
        in_bucket = bucket.flat[slot.offset : slot.offset + slot.numel].view(slot.shape)
        gradient = model.get_parameter(slot.name).grad
        assert gradient is not None
        assert gradient.data_ptr() == in_bucket.data_ptr()


class TestPuttingOff:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_what_is_put_off_is_added_later_and_is_the_same(self, dtype):
        """In the order in which the backward came to the layers, and bit by bit what is added at once."""
        model, taken = Padded(dtype), WeightGradients(added_to := Added())
        expected = gradients_of(deepcopy(model), WeightGradients(Added()))
        accumulate_in_products(model, taken, torch.float32, every_dtype=True)
        with taken.deferring() as deferred:
            model(TOKENS).float().square().sum().backward()
        assert added_to.main == {}
        assert [id(weight) for weight, _ in deferred] == [id(model.head.weight), id(model.embedding.weight)]
        for weight, add in deferred:
            add(added_to(weight))
        found = {name: added_to.main[id(weight)] for name, weight in model.named_parameters()}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)

    def test_another_dtype_than_the_main_gradients_is_added_as_autograd_does_it(self):
        model = Padded(torch.bfloat16)
        plain = deepcopy(model)
        for parameter in plain.parameters():
            parameter.grad_dtype = torch.float32
        plain(TOKENS).float().square().sum().backward()
        found = gradients_of(model, WeightGradients(Added()))
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            assert found[name].dtype == torch.float32
            assert torch.equal(found[name], parameter.grad), name


TOKENS = torch.tensor([[1, 4, 0], [4, 4, 2]])


class Padded(nn.Module):
    """An embedding of 5 rows, of which row 0 is padding, and a head."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 6, padding_idx=0)
        self.head = nn.Linear(6, 5, bias=False)
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


class Added:
    """Main gradients in float32, or in float64 for float64 weights, zero at first."""

    def __init__(self) -> None:
        self.main: dict[int, Tensor] = {}

    def __call__(self, weight: Tensor) -> Tensor:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return self.main.setdefault(id(weight), torch.zeros_like(weight, dtype=dtype))


def gradients_of(model: nn.Module, taken: WeightGradients) -> dict[str, Tensor]:
    """What a backward adds at once."""
    accumulate_in_products(model, taken, torch.float32, every_dtype=True)
    model(TOKENS).float().square().sum().backward()
    main = taken._main_gradient
    assert isinstance(main, Added)
    return {name: main.main[id(weight)] for name, weight in model.named_parameters()}
