"""One norm over everything, accumulated in enough digits, and PyTorch's clipping factor."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from syncline.runtime.optimization.clip import clipping_factor, squared_norm

CPU = torch.device("cpu")


@pytest.mark.parametrize("max_norm", [0.01, 1.0, 1e4])
def test_norm_and_factor_equal_torchs(max_norm):
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(size, generator=generator, dtype=torch.float64) for size in (64, 128, 6400)]
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    expected = nn.utils.clip_grad_norm_(parameters, max_norm)
    norm = squared_norm(gradients, CPU).sqrt()
    torch.testing.assert_close(norm, expected, rtol=1e-14, atol=0)
    factor = clipping_factor(norm, max_norm)
    assert factor <= 1.0
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(gradient * factor, parameter.grad, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_squares_accumulate_in_at_least_float32(dtype):
    """In bfloat16 a sum of ones ends at 256, in float16 at 2048; the square of 300 is too large for float16."""
    assert squared_norm([torch.ones(128_000, dtype=dtype)], CPU) == pytest.approx(128_000, rel=1e-6)
    assert squared_norm([torch.full((64,), 300.0, dtype=dtype)], CPU) == pytest.approx(64 * 90_000, rel=1e-5)


def test_millions_of_elements_keep_their_digits():
    """One float32 sum over all of them loses some."""
    flat = torch.randn(2**22, generator=torch.Generator().manual_seed(0)) * 1e-3
    assert float(squared_norm([flat], CPU)) == pytest.approx(float(flat.double().square().sum()), rel=1e-6)


def test_float64_keeps_its_digits():
    flat = torch.zeros(64, dtype=torch.float64)
    flat[:2] = torch.tensor([1.0, 1e-6])
    assert float(squared_norm([flat], CPU)) - 1.0 == pytest.approx(1e-12, rel=1e-3)


def test_no_gradients_have_the_norm_zero_and_are_not_scaled():
    norm = squared_norm([], CPU).sqrt()
    assert norm == 0.0
    assert norm.dtype == torch.float64
    assert clipping_factor(norm, 1.0) == 1.0


def test_a_norm_that_is_not_a_number_is_not_hidden():
    norm = squared_norm([torch.ones(64), torch.full((64,), float("nan"))], CPU).sqrt()
    assert norm.isnan()
    assert clipping_factor(norm, 1.0).isnan()
