"""Norms that were replaced compute what the model's own compute."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from syncline.modeling.checks import run_chained
from syncline.modeling.kernels.norm import fuse_norms
from syncline.modeling.recompute import enable_recompute
from syncline.verification.double import InFloat64, recompute_in_float64
from tests.modeling.families import random_micro_batch, tiny_config, tiny_model, tiny_stages

SIZE = 24
EPSILON = 1e-3
FUSED = {"llama": 7, "qwen3": 13, "mistral": 7, "phi3": 7, "olmo2": 13, "granite": 7, "qwen3_moe": 13}
"""Norms in three layers."""
LEFT_ALONE = ("gemma", "gemma2", "gemma3_text", "cohere", "gpt_neox", "gpt2")


def plain(input: Tensor, weight: Tensor) -> Tensor:
    return weight * (input * torch.rsqrt(input.pow(2).mean(-1, keepdim=True) + EPSILON))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def llama_norm(dtype: torch.dtype = torch.float64, *, fused: bool = True) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(SIZE, eps=EPSILON)
    norm.weight = nn.Parameter(random(SIZE, seed=1, dtype=dtype))
    with InFloat64() if dtype == torch.float64 else nullcontext():
        fuse_norms(norm if fused else nn.Identity())
    assert is_fused(norm) is fused
    return norm


def is_fused(norm: nn.Module) -> bool:
    return "forward" in vars(norm)


def output_and_gradients(function, input: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
    input = input.detach().requires_grad_()
    output = function(input)
    return (
        output.detach(),
        *torch.autograd.grad(output, (input, *parameters), random(*output.shape, seed=2, dtype=output.dtype)),
    )


@pytest.mark.parametrize("shape", [(SIZE,), (1, SIZE), (7, SIZE), (0, SIZE), (2, 5, SIZE), (2, 3, 5, SIZE)], ids=str)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_it_is_the_plain_norm(scale, shape):
    norm = llama_norm()
    input = scale * random(*shape)
    found = output_and_gradients(norm, input, norm.weight)
    expected = output_and_gradients(lambda input: plain(input, norm.weight), input, norm.weight)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12 * float(other.abs().sum()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_output_keeps_every_bit(dtype):
    norm, own = llama_norm(dtype), llama_norm(dtype, fused=False)
    with InFloat64() if dtype == torch.float64 else nullcontext():
        for input in (random(3, 50, SIZE, dtype=dtype), random(3, SIZE, 50, dtype=dtype).transpose(1, 2)):
            assert torch.equal(norm(input), own(input))
            with torch.no_grad():
                assert torch.equal(norm(input), own(input))


def test_gradients_against_finite_differences():
    norm = llama_norm()
    norm.weight.requires_grad_(False)
    assert torch.autograd.gradcheck(norm, random(3, SIZE).requires_grad_())
    norm.weight.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda weight: torch.func.functional_call(norm, {"weight": weight}, random(3, SIZE)),
        random(SIZE, seed=1).requires_grad_(),
    )


def test_heads_that_were_swapped_with_the_sequence():
    """As attention does it with its queries: what arrives from there has another order in memory."""
    norm = llama_norm()
    input = random(2, 5, 3, SIZE)
    found = output_and_gradients(lambda input: norm(input).transpose(1, 2), input, norm.weight)
    expected = output_and_gradients(lambda input: plain(input, norm.weight).transpose(1, 2), input, norm.weight)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_frozen_weight_gets_no_gradient_and_passes_it_on():
    norm = llama_norm()
    norm.weight.requires_grad_(False)
    found = output_and_gradients(norm, random(7, SIZE))
    expected = output_and_gradients(lambda input: plain(input, norm.weight), random(7, SIZE))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert norm.weight.grad is None


def test_an_input_without_gradient():
    norm = llama_norm()
    norm(random(7, SIZE)).sum().backward()
    (expected,) = torch.autograd.grad(plain(random(7, SIZE), norm.weight).sum(), norm.weight)
    torch.testing.assert_close(norm.weight.grad, expected, rtol=1e-12, atol=1e-12)


def test_what_is_kept_is_the_input_the_weight_and_a_number_per_row():
    norm = llama_norm()
    input = random(7, SIZE).requires_grad_()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        norm(input)
    assert [tensor.data_ptr() for tensor in kept[:2]] == [input.data_ptr(), norm.weight.data_ptr()]
    assert [tensor.numel() for tensor in kept[2:]] == [7]


def test_an_input_of_another_dtype_is_left_to_the_model():
    norm, own = llama_norm(torch.float32), llama_norm(torch.float32, fused=False)
    input = random(7, SIZE, dtype=torch.bfloat16)
    assert torch.equal(norm(input), own(input))


def test_elsewhere_than_on_the_cpu_it_is_the_norm_of_pytorch():
    norm = llama_norm()
    expected = functional.rms_norm(random(7, SIZE), (SIZE,), norm.weight, EPSILON)
    torch.testing.assert_close(norm(random(7, SIZE)), expected, rtol=1e-12, atol=1e-12)
    output = norm.to("meta")(random(7, SIZE).to("meta"))
    assert output.is_meta
    assert output.shape == (7, SIZE)
    assert "RmsNorm" not in output.grad_fn.name()


def test_hooks_run():
    norm = llama_norm()
    seen: list[Tensor] = []
    norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    output = norm(random(7, SIZE))
    assert len(seen) == 1
    assert seen[0] is output


def test_copies_have_a_weight_of_their_own():
    norm = llama_norm()
    for other in (deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert is_fused(other)
        assert torch.equal(other(random(7, SIZE)), norm(random(7, SIZE)))
        with torch.no_grad():
            other.weight.zero_()
        assert not other(random(7, SIZE)).any()
    assert norm(random(7, SIZE)).all()
    assert list(norm.state_dict()) == ["weight"]


# ---- Which modules are replaced --------------------------------------------------------------------------------------


class OutsideTheRoot(LlamaRMSNorm):
    """Epsilon is added to the root."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        root = hidden_states.pow(2).mean(-1, keepdim=True).sqrt()
        return self.weight * (hidden_states / (root + self.variance_epsilon))


class Detached(LlamaRMSNorm):
    """The scale counts as a constant: only gradients tell."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        scale = torch.rsqrt(hidden_states.detach().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (hidden_states * scale)


class Shifted(LlamaRMSNorm):
    """Its gradients are those of the plain norm."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + 1


class Fixed(LlamaRMSNorm):
    """Ends in an error for other inputs than its model's."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states.view(2, 3, 4, -1))


class WithBias(LlamaRMSNorm):
    def __init__(self, size: int, eps: float = EPSILON) -> None:
        super().__init__(size, eps)
        self.bias = nn.Parameter(torch.zeros(size))


def test_a_norm_of_pytorch_is_replaced_where_it_has_an_epsilon():
    norms = nn.ModuleList([nn.RMSNorm(SIZE, eps=EPSILON), nn.RMSNorm(SIZE)])
    fuse_norms(norms)
    assert [is_fused(norm) for norm in norms] == [True, False]


@pytest.mark.parametrize(
    "norm",
    [
        GemmaRMSNorm(SIZE, eps=EPSILON),
        MambaRMSNormGated(SIZE, group_size=SIZE, eps=EPSILON),
        nn.LayerNorm(SIZE, bias=False),
        OutsideTheRoot(SIZE, eps=EPSILON),
        Detached(SIZE, eps=EPSILON),
        Shifted(SIZE, eps=EPSILON),
        Fixed(SIZE, eps=EPSILON),
        WithBias(SIZE),
        LlamaRMSNorm(SIZE, eps=EPSILON).double(),  # Rounds to float32.
        LlamaRMSNorm(SIZE, eps=EPSILON).bfloat16(),
        LlamaRMSNorm(SIZE, eps=EPSILON).half(),
    ],
    ids=lambda norm: f"{type(norm).__name__}-{next(norm.parameters()).dtype}",
)
def test_what_is_something_else_is_left_alone(norm):
    fuse_norms(norm)
    assert not is_fused(norm)


def test_a_forward_that_was_replaced_already_is_left_alone():
    norm = LlamaRMSNorm(SIZE)
    norm.forward = forward = partial(LlamaRMSNorm.forward, norm)  # type: ignore[method-assign]
    fuse_norms(norm)
    assert norm.forward is forward


def test_the_trial_draws_from_no_one_elses_randomness():
    torch.manual_seed(5)
    expected = torch.rand(())
    torch.manual_seed(5)
    llama_norm()
    assert torch.equal(torch.rand(()), expected)


@pytest.mark.parametrize("family", FUSED)
def test_models_with_replaced_norms_compute_the_same(family):
    config, micro_batch = tiny_config(family), random_micro_batch()
    with InFloat64():
        (own,), (fused,) = (tiny_stages(config, 1) for _ in range(2))
        fuse_norms(fused)
        assert sum(map(is_fused, fused.modules())) == FUSED[family]
        (loss, expected), (found_loss, found) = (run_chained([stage], micro_batch) for stage in (own, fused))
    assert torch.equal(found_loss, loss)
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 1e-12 * largest, name


@pytest.mark.parametrize("family", FUSED)
def test_models_with_replaced_norms_have_the_same_logits_in_float32(family):
    own, fused = (tiny_model(tiny_config(family), dtype=torch.float32) for _ in range(2))
    fuse_norms(fused)
    tokens = random_micro_batch().input_ids
    assert torch.equal(fused(tokens).logits, own(tokens).logits)


@pytest.mark.parametrize("family", LEFT_ALONE)
def test_models_with_other_norms_are_left_alone(family):
    model = tiny_model(tiny_config(family), dtype=torch.float32)
    fuse_norms(model)
    assert not any(map(is_fused, model.modules()))


def test_recomputed_layers_have_the_same_gradients():
    config, micro_batch = tiny_config("qwen3"), random_micro_batch()
    with InFloat64():
        stages = tiny_stages(config, 1), tiny_stages(config, 1)
        for (stage,) in stages:
            fuse_norms(stage)
        enable_recompute(stages[1][0].model)
        recompute_in_float64(stages[1][0])
        (loss, expected), (found_loss, found) = (run_chained(each, micro_batch) for each in stages)
    assert torch.equal(found_loss, loss)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
