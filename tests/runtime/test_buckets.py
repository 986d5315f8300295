"""Parameters and gradients are views of their bucket, and a released bucket is gone."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from syncline.program.actions import Part
from syncline.program.layout import ALIGNMENT, Bucket, ParameterSpec, lay_out
from syncline.runtime.buckets import GradientBucket, ParameterBucket, Presence, Storage, StorageCount
from syncline.strategy import Ownership, Strategy
from tests.stand_ins import Weights, exact, micro_batch_of, start_worker, tokens

SHAPES = {"matrix": (5, 7), "wide": (3, 64), "scalar": ()}


def parameters_of(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()}


def bucket_of(shards: int = 1) -> Bucket:
    """One bucket, which divides into slices when there are several shards."""
    specs = [ParameterSpec(name, shape, 0) for name, shape in SHAPES.items()]
    ownership = Ownership.SLICES if shards > 1 else Ownership.REPLICATED
    (bucket,) = lay_out(specs, bucket_bytes=1 << 20, gradient_itemsize=4, ownership=ownership, shards=shards).buckets
    return bucket


def gradients_of(dtype: torch.dtype, gradient_dtype: torch.dtype) -> tuple[GradientBucket, dict[str, nn.Parameter]]:
    parameters, bucket = parameters_of(dtype), bucket_of()
    flat = ParameterBucket(bucket, parameters)
    return GradientBucket(bucket, flat.parameters, gradient_dtype, StorageCount()), parameters


def lies_in(view: Tensor, flat: Tensor) -> bool:
    return view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_every_bucket_divides_among_its_shards(shards):
    assert bucket_of(shards).numel % (ALIGNMENT * shards) == 0
    assert all(slot.offset % ALIGNMENT == 0 for slot in bucket_of(shards).slots)


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
    memory = StorageCount()
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


# ---- Shards ----------------------------------------------------------------------------------------------------------


SLICE = (ALIGNMENT, 3 * ALIGNMENT)
"""A part of the bucket that begins and ends inside of parameters."""


def sharded(*, keeps_shard: bool) -> tuple[GradientBucket, StorageCount]:
    bucket, memory = bucket_of(), StorageCount()
    flat = ParameterBucket(bucket, parameters_of(torch.float32), SLICE)
    return GradientBucket(bucket, flat.parameters, torch.float32, memory, SLICE, keeps_shard=keeps_shard), memory


def test_without_a_shard_the_owned_part_of_the_bucket_is_consumed():
    gradients, _ = sharded(keeps_shard=False)
    gradients.allocate()
    gradients.flat.copy_(torch.arange(gradients.flat.numel()))
    assert torch.equal(gradients.owned, torch.arange(*SLICE).float())
    assert lies_in(gradients.consumed, gradients.flat)
    assert torch.equal(gradients.consumed, gradients.owned)


def test_a_shard_adds_up_the_owned_part_and_outlives_the_bucket():
    gradients, _ = sharded(keeps_shard=True)
    gradients.allocate(Part.SHARD)
    for factor in (1.0, 10.0):
        gradients.allocate()
        gradients.flat.copy_(factor * torch.arange(gradients.flat.numel()))
        gradients.accumulate_shard()
        gradients.free()
    assert torch.equal(gradients.consumed, 11.0 * torch.arange(*SLICE).float())
    gradients.zero(Part.SHARD)
    assert gradients.consumed.shape == (SLICE[1] - SLICE[0],)
    assert (gradients.consumed == 0).all()


def test_a_freed_shard_is_gone_and_comes_back_empty():
    gradients, _ = sharded(keeps_shard=True)
    gradients.allocate(Part.SHARD)
    gradients.consumed.fill_(1.0)
    storage = weakref.ref(gradients.consumed.untyped_storage())
    gradients.free(Part.SHARD)
    assert storage() is None
    with pytest.raises(AssertionError, match="shard of bucket 0 has been released"):
        _ = gradients.consumed
    gradients.allocate(Part.SHARD)
    assert (gradients.consumed == 0).all()
    with pytest.raises(AssertionError):
        gradients.allocate(Part.SHARD)


def test_a_bucket_that_is_consumed_in_place_has_no_shard():
    gradients, _ = sharded(keeps_shard=False)
    with pytest.raises(AssertionError):
        gradients.allocate(Part.SHARD)


def test_memory_counts_shards_by_their_own_size():
    gradients, memory = sharded(keeps_shard=True)
    whole, part = gradients.bucket.numel * 4, (SLICE[1] - SLICE[0]) * 4
    gradients.allocate(Part.SHARD)
    assert memory.held == part
    gradients.allocate()
    gradients.free()
    assert (memory.held, memory.peak) == (part, part + whole)
    gradients.free(Part.SHARD)
    assert memory.held == 0


# ---- Divided parameters ----------------------------------------------------------------------------------------------


def divided() -> tuple[ParameterBucket, dict[str, nn.Parameter], StorageCount]:
    parameters, memory = parameters_of(torch.float32), StorageCount()
    return ParameterBucket(bucket_of(), parameters, SLICE, memory, divided=True), parameters, memory


def test_divided_parameters_begin_with_their_owned_part_only():
    whole = ParameterBucket(bucket_of(), parameters_of(torch.float32)).flat
    bucket, parameters, memory = divided()
    assert bucket.presence is Presence.OWNED
    assert bucket.flat.untyped_storage().nbytes() == 0
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in parameters.values())
    assert {name: tuple(parameter.shape) for name, parameter in parameters.items()} == SHAPES
    assert torch.equal(bucket.owned, whole[SLICE[0] : SLICE[1]])
    assert memory.held == 0


def test_restored_parameters_hold_the_owned_part_and_are_the_same_views():
    bucket, parameters, memory = divided()
    bucket.owned.fill_(7.0)
    bucket.restore()
    assert memory.held == bucket.flat.nbytes == bucket.bucket.numel * 4
    assert (bucket.flat[SLICE[0] : SLICE[1]] == 7.0).all()
    assert all(lies_in(parameter, bucket.flat) for parameter in parameters.values())
    bucket.presence = Presence.WHOLE
    bucket.flat[: SLICE[0]] = 5.0
    assert parameters["scalar"] == 5.0
    bucket.free()
    assert memory.held == 0
    assert bucket.flat.untyped_storage().nbytes() == 0
    assert (bucket.owned == 7.0).all()


def test_divided_parameters_are_not_freed_or_restored_out_of_turn():
    bucket, _, _ = divided()
    with pytest.raises(AssertionError):
        bucket.free()
    bucket.restore()
    bucket.presence = Presence.GATHERING
    with pytest.raises(AssertionError):
        bucket.free()
    with pytest.raises(AssertionError):
        bucket.restore()


def test_whole_parameters_are_owned_in_place():
    bucket = ParameterBucket(bucket_of(), parameters_of(torch.float32), SLICE)
    assert not bucket.divided
    assert bucket.presence is Presence.WHOLE
    assert lies_in(bucket.owned, bucket.flat)
    with pytest.raises(AssertionError):
        bucket.free()


def test_a_backward_works_on_what_was_freed_and_restored():
    """Autograd keeps the views that the forward has used, and finds the values there again."""
    bucket, parameters, _ = divided()
    plain = parameters_of(torch.float32)
    input = torch.randn(2, 7, generator=torch.Generator().manual_seed(1))
    whole = ParameterBucket(bucket_of(), parameters_of(torch.float32)).flat

    def gather() -> None:
        bucket.restore()
        bucket.flat.copy_(whole)
        bucket.presence = Presence.WHOLE

    gather()
    given, expected = input.clone().requires_grad_(), input.clone().requires_grad_()
    output = (given @ parameters["matrix"].t()).square().sum()
    bucket.free()
    gather()
    output.backward()
    (expected @ plain["matrix"].t()).square().sum().backward()
    assert torch.equal(gradient_of(parameters["matrix"]), gradient_of(plain["matrix"]))
    torch.testing.assert_close(given.grad, expected.grad, rtol=0, atol=0)


@pytest.mark.parametrize("release", [False, True])
def test_between_steps_a_worker_holds_its_gradients_or_nothing(release):
    model = Weights(stages=(("a", "b", "unused"),))
    worker = start_worker(0, exact(Strategy(micro_batches=2, release_gradients=release)), model)
    given = [micro_batch_of([*tokens(1.0, weight=0), *tokens(2.0, weight=1)])] * 2
    size = 3 * ALIGNMENT * 8
    for _ in range(3):
        result = worker.step(given, 0.1)
        assert result.peak_gradient_bytes == size
        assert result.held_gradient_bytes == worker.gradients.memory.held == (0 if release else size)
        for bucket in worker.gradients.buckets.values():
            for parameter in bucket.parameters:
                assert (parameter.grad is None) == release
