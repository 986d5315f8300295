"""Gated layers that compute their activation again change no bit."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaMLP

from syncline.modeling.checks import run_chained
from syncline.modeling.kernels.gated_mlp import fuse_gated_mlps
from syncline.modeling.kernels.linear import WeightGradients, accumulate_in_products
from tests.modeling.families import random_micro_batch, tiny_config, tiny_stages

HIDDEN, INTERMEDIATE = 8, 20
CONFIG = SimpleNamespace(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, mlp_bias=False, hidden_act="silu")
FUSED = {"llama": 3, "qwen3": 3, "mistral": 3, "olmo2": 3, "granite": 3, "cohere": 3}
LEFT_ALONE = ("gemma", "gemma2", "gemma3_text", "phi3", "glm4", "gpt_neox", "mixtral")


def two_mlps(dtype: torch.dtype = torch.float64, **values) -> tuple[LlamaMLP, LlamaMLP]:
    """One as the model has it, one replaced."""
    torch.manual_seed(0)
    own = LlamaMLP(SimpleNamespace(**vars(CONFIG) | values)).to(dtype)
    fused = deepcopy(own)
    fuse_gated_mlps(fused)
    assert is_fused(fused)
    return own, fused


def is_fused(mlp: nn.Module) -> bool:
    return "forward" in vars(mlp)


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def output_and_gradients(mlp: nn.Module, input: Tensor) -> list[Tensor]:
    input = input.detach().requires_grad_()
    wanted = [input, *(parameter for parameter in mlp.parameters() if parameter.requires_grad)]
    output = mlp(input)
    return [output, *torch.autograd.grad(output, wanted, random(*output.shape, dtype=output.dtype))]


def kept_of_intermediate_size(mlp: nn.Module) -> int:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        mlp(random(7, HIDDEN).requires_grad_())
    return sum(tensor.numel() == 7 * INTERMEDIATE for tensor in kept)


def main_gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_bit_is_kept(dtype, bias):
    own, fused = two_mlps(dtype, mlp_bias=bias)
    for input in (random(2, 7, HIDDEN, dtype=dtype), 100 * random(7, HIDDEN, dtype=dtype)):
        assert_equal(output_and_gradients(fused, input), output_and_gradients(own, input))
    with torch.no_grad():
        assert torch.equal(fused(random(7, HIDDEN, dtype=dtype)), own(random(7, HIDDEN, dtype=dtype)))


def test_gradients_against_finite_differences():
    _, fused = two_mlps()
    assert torch.autograd.gradcheck(fused, random(3, HIDDEN).requires_grad_())


def test_the_activation_is_not_kept():
    own, fused = map(kept_of_intermediate_size, two_mlps())
    assert own == 4, "the gate for the activation, the activation and up for the product, the product for its layer"
    assert fused == 3


def test_frozen_projections():
    own, fused = two_mlps()
    for mlp in (own, fused):
        mlp.gate_proj.weight.requires_grad_(False)
        mlp.down_proj.weight.requires_grad_(False)
    assert_equal(output_and_gradients(fused, random(7, HIDDEN)), output_and_gradients(own, random(7, HIDDEN)))
    for mlp in (own, fused):
        mlp(random(7, HIDDEN)).sum().backward()
    assert torch.equal(main_gradient(fused.up_proj.weight), main_gradient(own.up_proj.weight))
    assert fused.gate_proj.weight.grad is None


def test_projections_that_accumulate_their_gradients():
    own, fused = two_mlps()
    for parameter in fused.parameters():
        parameter.grad = torch.zeros_like(parameter)
    accumulate_in_products(fused, WeightGradients(main_gradient), torch.float64)
    for mlp in (own, fused):
        mlp(random(7, HIDDEN)).square().sum().backward()
    for found, expected in zip(fused.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-12)


def test_hooks_of_the_layer_and_of_its_projections_run():
    _, fused = two_mlps()
    seen: list[nn.Module] = []
    modules = (fused.gate_proj, fused.up_proj, fused.down_proj, fused)
    for module in modules:
        module.register_forward_hook(lambda module, inputs, output: seen.append(module))
    fused(random(7, HIDDEN))
    assert seen == list(modules)


class UpFirst(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class InFloat32(LlamaMLP):
    """Differs in lower precision only."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj((self.act_fn(self.gate_proj(x).float()) * self.up_proj(x).float()).to(x.dtype))


class WithDropout(LlamaMLP):
    """None in evaluation."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x))


class Scaled(LlamaMLP):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    "mlp",
    [
        GemmaMLP(SimpleNamespace(**vars(CONFIG) | {"hidden_act": "gelu_pytorch_tanh"})),
        LlamaMLP(SimpleNamespace(**vars(CONFIG) | {"hidden_act": "relu"})),
        UpFirst(CONFIG),
        InFloat32(CONFIG).bfloat16(),
        WithDropout(CONFIG).eval(),
        Scaled(CONFIG),
    ],
    ids=lambda mlp: type(mlp).__name__,
)
def test_what_is_something_else_is_left_alone(mlp):
    fuse_gated_mlps(mlp)
    assert not is_fused(mlp)


def test_the_trial_leaves_the_layer_and_the_random_state_as_they_are():
    mlp = LlamaMLP(CONFIG)
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in mlp.named_parameters()}
    torch.manual_seed(5)
    expected = torch.rand(())
    torch.manual_seed(5)
    fuse_gated_mlps(mlp)
    assert torch.equal(torch.rand(()), expected)
    for name, parameter in mlp.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
        assert parameter.grad is None


@pytest.mark.parametrize("family", FUSED)
def test_models_with_replaced_layers_change_no_bit(family):
    config, micro_batch = tiny_config(family), random_micro_batch()
    (own,), (fused,) = (tiny_stages(config, 1, dtype=torch.float32) for _ in range(2))
    fuse_gated_mlps(fused)
    assert sum(map(is_fused, fused.modules())) == FUSED[family]
    (loss, expected), (found_loss, found) = (run_chained([stage], micro_batch) for stage in (own, fused))
    assert torch.equal(found_loss, loss)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("family", LEFT_ALONE)
def test_models_with_other_layers_are_left_alone(family):
    (stage,) = tiny_stages(tiny_config(family), 1)
    fuse_gated_mlps(stage)
    assert not any(map(is_fused, stage.modules()))
