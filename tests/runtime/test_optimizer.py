"""One fused update of a flat bucket equals PyTorch's plain optimizers, parameter by parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from syncline.program.layout import Bucket, ParameterSpec, lay_out
from syncline.runtime.buckets import GradientBucket, GradientMemory, ParameterBucket
from syncline.runtime.optimizer import BucketOptimizer, OptimizerSettings

SHAPES = {"a": (6, 9), "b": (17,), "c": (2, 3, 4)}
STEPS = 5
ADAMW = OptimizerSettings("adamw", weight_decay=0.1, beta1=0.8, beta2=0.95, epsilon=1e-7)
SGD = OptimizerSettings("sgd", weight_decay=0.1)
TOLERANCES = {torch.float32: 2e-6, torch.float64: 1e-14}


class Flat:
    """A bucket of parameters with its gradients and optimizer."""

    def __init__(self, dtype: torch.dtype, gradient_dtype: torch.dtype, settings: OptimizerSettings, decay: bool):
        specs = [ParameterSpec(name, shape, 0, decay) for name, shape in SHAPES.items()]
        self.bucket: Bucket = lay_out(specs, bucket_bytes=1 << 20, gradient_itemsize=4, replicas=1).buckets[0]
        generator = torch.Generator().manual_seed(1)
        initial = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
        self.parameters = {name: nn.Parameter(value.to(dtype)) for name, value in initial.items()}
        flat = ParameterBucket(self.bucket, self.parameters)
        self.gradients = GradientBucket(self.bucket, flat.parameters, gradient_dtype, GradientMemory())
        self.gradients.allocate()
        self.optimizer = BucketOptimizer(flat, settings, decay)

    def step(self, gradients: dict[str, torch.Tensor], learning_rate: float, factor: float | None) -> None:
        for name, gradient in gradients.items():
            own = self.parameters[name].grad
            assert own is not None
            own.copy_(gradient)
        scale = None if factor is None else torch.tensor(factor, dtype=torch.float64)
        self.optimizer.step(self.gradients, learning_rate, scale)


def plain_optimizer(parameters: list[nn.Parameter], settings: OptimizerSettings, decay: bool) -> torch.optim.Optimizer:
    weight_decay = settings.weight_decay if decay else 0.0
    if settings.kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.0, weight_decay=weight_decay, foreach=False)
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(
        parameters, lr=0.0, betas=betas, eps=settings.epsilon, weight_decay=weight_decay, foreach=False, fused=False
    )


def given_gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def both(
    flat: Flat, plain: dict[str, nn.Parameter], settings: OptimizerSettings, decay: bool, factor: float | None
) -> None:
    """Some updates of both, with a learning rate and gradients that change."""
    optimizer = plain_optimizer(list(plain.values()), settings, decay)
    for step in range(STEPS):
        learning_rate = 0.01 / (step + 1)
        gradients = given_gradients(step)
        flat.step(gradients, learning_rate, factor)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        for name, parameter in plain.items():
            rounded = gradients[name].to(flat.gradients.dtype).to(parameter.dtype)
            parameter.grad = rounded * (1.0 if factor is None else factor)
        optimizer.step()


@pytest.mark.parametrize("factor", [None, 0.37, 1e-4])
@pytest.mark.parametrize("decay", [True, False])
@pytest.mark.parametrize("settings", [ADAMW, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_flat_updates_equal_those_of_each_parameter(dtype, settings, decay, factor):
    flat = Flat(dtype, dtype, settings, decay)
    plain = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in flat.parameters.items()}
    both(flat, plain, settings, decay, factor)
    for name, parameter in plain.items():
        torch.testing.assert_close(flat.parameters[name], parameter, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("factor", [None, 0.37])
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_parameters_are_rounded_copies_of_float32_masters(gradient_dtype, factor):
    flat = Flat(torch.bfloat16, gradient_dtype, ADAMW, decay=True)
    plain = {name: nn.Parameter(parameter.detach().float()) for name, parameter in flat.parameters.items()}
    both(flat, plain, ADAMW, True, factor)
    masters = {slot.name: slot for slot in flat.bucket.slots}
    for name, parameter in plain.items():
        slot = masters[name]
        master = flat.optimizer.master[slot.offset : slot.offset + slot.numel].view(slot.shape)
        assert master.dtype == torch.float32
        torch.testing.assert_close(master, parameter, rtol=2e-6, atol=2e-6)
        assert torch.equal(flat.parameters[name], master.bfloat16())


def test_masters_keep_updates_that_bfloat16_would_lose():
    flat = Flat(torch.bfloat16, torch.float32, OptimizerSettings("sgd"), decay=False)
    before = flat.parameters["b"].detach().float().clone()
    ones = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    for _ in range(1000):
        flat.step(ones, 1e-4, None)
    torch.testing.assert_close(flat.parameters["b"].detach().float(), before - 0.1, rtol=2**-7, atol=1e-3)


def test_padding_stays_zero():
    flat = Flat(torch.float32, torch.float32, ADAMW, decay=True)
    for step in range(STEPS):
        flat.step(given_gradients(step), 0.01, 0.5)
    assert flat.optimizer.master.numel() > sum(parameter.numel() for parameter in flat.parameters.values())
    assert flat.optimizer.master.count_nonzero() == sum(p.count_nonzero() for p in flat.parameters.values())


def test_no_gradient_is_kept_by_the_optimizer():
    flat = Flat(torch.float32, torch.float32, ADAMW, decay=True)
    flat.step(given_gradients(0), 0.01, None)
    assert flat.optimizer.master.grad is None
