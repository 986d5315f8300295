"""Parameters and gradients are views of their bucket, and a released bucket is gone."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from syncline.program.layout import ALIGNMENT, Bucket, ParameterSpec, lay_out
from syncline.runtime.buckets import GradientBucket, GradientMemory, ParameterBucket, Storage
from syncline.strategy import Strategy
from tests.stand_ins import Weights, exact, micro_batch_of, start_worker, tokens

SHAPES = {"matrix": (5, 7), "wide": (3, 64), "scalar": ()}


def parameters_of(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()}


def bucket_of(replicas: int = 1) -> Bucket:
    specs = [ParameterSpec(name, shape, 0, decay=True) for name, shape in SHAPES.items()]
    (bucket,) = lay_out(specs, bucket_bytes=1 << 20, gradient_itemsize=4, replicas=replicas).buckets
    return bucket


def gradients_of(dtype: torch.dtype, gradient_dtype: torch.dtype) -> tuple[GradientBucket, dict[str, nn.Parameter]]:
    parameters, bucket = parameters_of(dtype), bucket_of()
    flat = ParameterBucket(bucket, parameters)
    return GradientBucket(bucket, flat.parameters, gradient_dtype, GradientMemory()), parameters


def lies_in(view: Tensor, flat: Tensor) -> bool:
    return view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
def test_every_bucket_divides_among_its_replicas(replicas):
    assert bucket_of(replicas).numel % (ALIGNMENT * replicas) == 0
    assert all(slot.offset % ALIGNMENT == 0 for slot in bucket_of(replicas).slots)


def test_parameters_become_views_and_keep_their_values():
    before = {name: parameter.detach().clone() for name, parameter in parameters_of(torch.float32).items()}
    parameters = parameters_of(torch.float32)
    flat = ParameterBucket(bucket_of(), parameters).flat
    for name, parameter in parameters.items():
        assert torch.equal(parameter, before[name])
        assert lies_in(parameter, flat)
    flat.fill_(3.0)
    assert all((parameter == 3.0).all() for parameter in parameters.values())


def test_padding_is_zero():
    parameters = parameters_of(torch.float32)
    flat = ParameterBucket(bucket_of(3), parameters).flat
    assert flat.count_nonzero() == sum(parameter.count_nonzero() for parameter in parameters.values())


@pytest.mark.parametrize(
    ("dtype", "gradient_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float64),
    ],
)
def test_autograd_accumulates_into_the_bucket_in_place(dtype, gradient_dtype):
    gradients, parameters = gradients_of(dtype, gradient_dtype)
    gradients.allocate()
    addresses = {name: gradient_of(parameter).data_ptr() for name, parameter in parameters.items()}
    for factor in (1.0, 2.0, 0.5):
        torch.stack([factor * parameter.sum() for parameter in parameters.values()]).sum().backward()
    for name, parameter in parameters.items():
        gradient = gradient_of(parameter)
        assert gradient.dtype == gradient_dtype
        assert gradient.data_ptr() == addresses[name]
        assert lies_in(gradient, gradients.flat)
        assert (gradient == 3.5).all()
    assert gradients.flat.sum() == 3.5 * sum(parameter.numel() for parameter in parameters.values())


def test_main_gradients_keep_what_bfloat16_would_lose():
    """1 and then 64 times 1/256: in bfloat16 every one of the small ones rounds away."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        gradients, parameters = gradients_of(torch.bfloat16, dtype)
        gradients.allocate()
        for factor in (1.0, *[2.0**-8] * 64):
            (factor * parameters["matrix"].sum()).backward()
        found[dtype] = gradient_of(parameters["matrix"])[0, 0].item()
    assert found == {torch.float32: 1.25, torch.bfloat16: 1.0}


def test_a_parameter_that_nothing_reaches_leaves_zeros():
    gradients, parameters = gradients_of(torch.float32, torch.float32)
    gradients.allocate()
    parameters["wide"].sum().backward()
    assert (gradient_of(parameters["matrix"]) == 0).all()
    assert gradients.flat.sum() == parameters["wide"].numel()


def test_free_gives_the_storage_back():
    gradients, parameters = gradients_of(torch.float32, torch.float32)
    assert gradients.state is Storage.RELEASED
    gradients.allocate()
    parameters["matrix"].sum().backward()
    storage = weakref.ref(gradients.flat.untyped_storage())
    gradients.free()
    assert storage() is None
    assert all(parameter.grad is None for parameter in parameters.values())
    with pytest.raises(AssertionError, match="released"):
        _ = gradients.flat
    gradients.allocate()
    assert (gradients.flat == 0).all()


def test_memory_counts_what_is_held_and_its_peak():
    memory = GradientMemory()
    buckets = []
    for _ in range(2):
        flat = ParameterBucket(bucket_of(), parameters_of(torch.bfloat16))
        buckets.append(GradientBucket(flat_bucket := bucket_of(), flat.parameters, torch.float32, memory))
    size = flat_bucket.numel * 4
    assert (memory.held, memory.peak) == (0, 0)
    for bucket in buckets:
        bucket.allocate()
    assert (memory.held, memory.peak) == (2 * size, 2 * size)
    buckets[0].free()
    assert (memory.held, memory.peak) == (size, 2 * size)
    memory.restart_peak()
    assert memory.peak == size


def test_nobody_touches_a_bucket_that_is_being_reduced():
    gradients, _ = gradients_of(torch.float32, torch.float32)
    gradients.allocate()
    gradients.state = Storage.REDUCING
    for touch in (gradients.zero, gradients.free, gradients.allocate):
        with pytest.raises(AssertionError):
            touch()


@pytest.mark.parametrize("release", [False, True])
def test_between_steps_a_worker_holds_its_gradients_or_nothing(release):
    model = Weights(stages=(("a", "b", "unused"),))
    worker = start_worker(0, exact(Strategy(micro_batches=2, release_gradients=release)), model)
    given = [micro_batch_of([*tokens(1.0, weight=0), *tokens(2.0, weight=1)])] * 2
    size = 3 * ALIGNMENT * 8
    for _ in range(3):
        result = worker.step(given, 0.1)
        assert result.peak_gradient_bytes == size
        assert result.held_gradient_bytes == worker.memory.held == (0 if release else size)
        for bucket in worker.gradients.values():
            for parameter in bucket.parameters:
                assert (parameter.grad is None) == release
