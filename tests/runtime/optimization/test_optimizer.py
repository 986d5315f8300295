"""The updates of a flat bucket, or of a slice of it, equal PyTorch's plain optimizers, parameter by parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from syncline.program.layout import ALIGNMENT, Bucket, ParameterSpec, lay_out
from syncline.runtime.buckets import GradientBucket, ParameterBucket, StorageCount
from syncline.runtime.optimization.optimizer import BucketOptimizer, OptimizerSettings, Piece, pieces
from syncline.strategy import Ownership

SHAPES = {"a": (6, 9), "b": (17,), "c": (2, 3, 4)}
STEPS = 5
ADAMW = OptimizerSettings("adamw", weight_decay=0.1, beta1=0.8, beta2=0.95, epsilon=1e-7)
SGD = OptimizerSettings("sgd", weight_decay=0.1)
TOLERANCES = {torch.float32: 2e-6, torch.float64: 1e-14}
FIRST = dict.fromkeys(SHAPES, 0)
"""Every parameter has the first settings."""


class Flat:
    """A bucket of parameters with its gradients and optimizer; `owned` is the part that is updated."""

    def __init__(
        self,
        dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        all_settings: Sequence[OptimizerSettings],
        settings_of: Mapping[str, int] = FIRST,
        owned: tuple[int, int] | None = None,
        shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    ):
        specs = [ParameterSpec(name, shape, 0, settings=settings_of[name]) for name, shape in shapes.items()]
        self.bucket: Bucket = lay_out(specs, bucket_bytes=1 << 20, gradient_itemsize=4).buckets[0]
        generator = torch.Generator().manual_seed(1)
        initial = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
        self.parameters = {name: nn.Parameter(value.to(dtype)) for name, value in initial.items()}
        self.flat = ParameterBucket(self.bucket, self.parameters, owned)
        self.gradients = GradientBucket(self.bucket, self.flat.parameters, gradient_dtype, StorageCount(), owned)
        self.gradients.allocate()
        self.optimizer = BucketOptimizer(self.bucket, self.flat.owned, all_settings, owned)

    def step(
        self,
        gradients: Mapping[str, Tensor],
        learning_rate: float,
        factor: float | None,
        overflow: float | None = None,
    ) -> None:
        for name, gradient in gradients.items():
            own = self.parameters[name].grad
            assert own is not None
            own.copy_(gradient)
        scale = None if factor is None else torch.tensor(factor, dtype=torch.float64)
        verdict = None if overflow is None else torch.tensor(overflow)
        self.optimizer.step(self.gradients.consumed, learning_rate, scale, verdict)

    def state(self) -> list[tuple[Piece, dict[str, Tensor]]]:
        return [
            (piece, {name: value.clone() for name, value in state.items()}) for piece, state in self.optimizer.state()
        ]


def plain_optimizer(parameters: list[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    if settings.kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.0, weight_decay=settings.weight_decay, foreach=False)
    if settings.kind == "adafactor":
        return torch.optim.Adafactor(parameters, lr=0.0, weight_decay=settings.weight_decay)
    if settings.kind == "muon":
        return torch.optim.Muon(
            parameters,
            lr=0.0,
            weight_decay=settings.weight_decay,
            momentum=settings.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(
        parameters,
        lr=0.0,
        betas=betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        foreach=False,
        fused=False,
    )


def given_gradients(step: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def both(
    flat: Flat,
    plain: dict[str, nn.Parameter],
    all_settings: Sequence[OptimizerSettings],
    factor: float | None,
    settings_of: Mapping[str, int] = FIRST,
) -> None:
    """Some updates of both, with a learning rate and gradients that change."""
    optimizers = [
        (settings, plain_optimizer([plain[name] for name in plain if settings_of[name] == index], settings))
        for index, settings in enumerate(all_settings)
        if index in settings_of.values()
    ]
    shapes = {name: tuple(parameter.shape) for name, parameter in plain.items()}
    for step in range(STEPS):
        learning_rate = 0.01 / (step + 1)
        gradients = given_gradients(step, shapes)
        flat.step(gradients, learning_rate, factor)
        for name, parameter in plain.items():
            rounded = gradients[name].to(flat.gradients.dtype).to(parameter.dtype)
            parameter.grad = rounded * (1.0 if factor is None else factor)
        for settings, optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * settings.learning_rate
            optimizer.step()


def copies(flat: Flat) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(parameter.detach().clone()) for name, parameter in flat.parameters.items()}


def decaying(settings: OptimizerSettings, decay: bool) -> OptimizerSettings:
    return settings if decay else replace(settings, weight_decay=0.0)


@pytest.mark.parametrize("factor", [None, 0.37, 1e-4])
@pytest.mark.parametrize("decay", [True, False])
@pytest.mark.parametrize("settings", [ADAMW, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_flat_updates_equal_those_of_each_parameter(dtype, settings, decay, factor):
    all_settings = [decaying(settings, decay)]
    flat = Flat(dtype, dtype, all_settings)
    plain = copies(flat)
    both(flat, plain, all_settings, factor)
    for name, parameter in plain.items():
        torch.testing.assert_close(flat.parameters[name], parameter, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("factor", [None, 0.37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_parameter_is_updated_by_its_own_rule(dtype, factor):
    """Two ways of adamw, with learning rates of their own, and sgd, in one bucket."""
    all_settings = [
        ADAMW,
        replace(ADAMW, weight_decay=0.0, beta1=0.5, learning_rate=3.0),
        replace(SGD, learning_rate=0.5),
    ]
    settings_of = {"a": 2, "b": 0, "c": 1}
    flat = Flat(dtype, dtype, all_settings, settings_of)
    plain = copies(flat)
    both(flat, plain, all_settings, factor, settings_of)
    for name, parameter in plain.items():
        torch.testing.assert_close(flat.parameters[name], parameter, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("factor", [None, 0.37])
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_parameters_are_rounded_copies_of_float32_masters(gradient_dtype, factor):
    flat = Flat(torch.bfloat16, gradient_dtype, [ADAMW])
    plain = {name: nn.Parameter(parameter.detach().float()) for name, parameter in flat.parameters.items()}
    both(flat, plain, [ADAMW], factor)
    masters = {slot.name: slot for slot in flat.bucket.slots}
    for name, parameter in plain.items():
        slot = masters[name]
        master = flat.optimizer.master[slot.offset : slot.offset + slot.numel].view(slot.shape)
        assert master.dtype == torch.float32
        torch.testing.assert_close(master, parameter, rtol=2e-6, atol=2e-6)
        assert torch.equal(flat.parameters[name], master.bfloat16())


def test_masters_keep_updates_that_bfloat16_would_lose():
    flat = Flat(torch.bfloat16, torch.float32, [OptimizerSettings("sgd")])
    before = flat.parameters["b"].detach().float().clone()
    ones = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    for _ in range(1000):
        flat.step(ones, 1e-4, None)
    torch.testing.assert_close(flat.parameters["b"].detach().float(), before - 0.1, rtol=2**-7, atol=1e-3)


def test_padding_stays_zero():
    flat = Flat(torch.float32, torch.float32, [ADAMW])
    for step in range(STEPS):
        flat.step(given_gradients(step), 0.01, 0.5)
    assert flat.optimizer.master.numel() > sum(parameter.numel() for parameter in flat.parameters.values())
    assert flat.optimizer.master.count_nonzero() == sum(p.count_nonzero() for p in flat.parameters.values())


def test_no_gradient_is_kept_by_the_optimizer():
    flat = Flat(torch.float32, torch.float32, [ADAMW])
    flat.step(given_gradients(0), 0.01, None)
    assert flat.optimizer.master.grad is None
    assert all(p.grad is None for each in flat.optimizer.optimizers for g in each.param_groups for p in g["params"])


# ---- Slices ----------------------------------------------------------------------------------------------------------

TWO_SETTINGS = [ADAMW, decaying(ADAMW, False)]
MIXED = {"a": 0, "b": 1, "c": 0}


def bucket_of(settings_of: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Bucket:
    specs = [ParameterSpec(name, shape, 0, settings=settings_of[name]) for name, shape in shapes.items()]
    return lay_out(specs, bucket_bytes=1 << 20, gradient_itemsize=4).buckets[0]


def test_pieces_are_the_runs_of_one_rule_within_the_slice():
    """c, a and b take 64 elements each; the first two have one settings."""
    bucket = bucket_of(MIXED)
    assert [(s.settings, s.start, s.stop) for s in bucket.segments] == [(0, 0, 128), (1, 128, 192)]
    assert list(pieces(bucket, TWO_SETTINGS, (0, 192))) == [Piece(0, 0, 128, (128,)), Piece(1, 128, 192, (64,))]
    assert list(pieces(bucket, TWO_SETTINGS, (64, 192))) == [Piece(0, 0, 64, (64,)), Piece(1, 64, 128, (64,))]
    assert list(pieces(bucket, TWO_SETTINGS, (0, 96))) == [Piece(0, 0, 96, (96,))]
    assert list(pieces(bucket, TWO_SETTINGS, (96, 192))) == [Piece(0, 0, 32, (32,)), Piece(1, 32, 96, (64,))]
    assert list(pieces(bucket, TWO_SETTINGS, (128, 192))) == [Piece(1, 0, 64, (64,))]
    assert list(pieces(bucket, TWO_SETTINGS, (0, 0))) == []


def test_pieces_of_optimizers_of_whole_tensors_are_the_parameters():
    bucket = bucket_of(MIXED)
    muon = [OptimizerSettings("muon"), ADAMW]
    assert list(pieces(bucket, muon, (0, 192))) == [
        Piece(0, 0, 24, (2, 3, 4)),
        Piece(0, 64, 118, (6, 9)),
        Piece(1, 128, 192, (64,)),
    ]
    assert list(pieces(bucket, muon, (0, 0))) == []
    with pytest.raises(AssertionError, match="not owned whole"):
        list(pieces(bucket, muon, (0, 96)))
    with pytest.raises(AssertionError, match="not owned whole"):
        list(pieces(bucket, muon, (64, 192)))


@pytest.mark.parametrize("factor", [None, 0.37])
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_slices_are_updated_to_the_same_bits_as_the_whole(kind, dtype, gradient_dtype, factor):
    """Three slices, the middle one of which cuts the segments of two all_settings."""
    if dtype != torch.bfloat16:
        gradient_dtype = dtype
    all_settings = [replace(settings, kind=kind) for settings in TWO_SETTINGS]
    whole = Flat(dtype, gradient_dtype, all_settings, MIXED)
    slices = [Flat(dtype, gradient_dtype, all_settings, MIXED, owned) for owned in ((0, 100), (100, 132), (132, 192))]
    for step in range(STEPS):
        for flat in (whole, *slices):
            flat.step(given_gradients(step), 0.01 / (step + 1), factor)
    assert torch.equal(torch.cat([flat.flat.owned for flat in slices]), whole.flat.flat)
    assert torch.equal(torch.cat([flat.optimizer.master for flat in slices]), whole.optimizer.master)
    for flat in slices:
        start, stop = flat.flat.range
        before = Flat(dtype, gradient_dtype, all_settings, MIXED).flat.flat
        rest = torch.ones(192, dtype=torch.bool)
        rest[start:stop] = False
        assert torch.equal(flat.flat.flat[rest], before[rest]), "nobody touches what another owns"


def test_the_state_of_slices_is_the_state_of_the_whole():
    whole = Flat(torch.float32, torch.float32, TWO_SETTINGS, MIXED)
    slices = [Flat(torch.float32, torch.float32, TWO_SETTINGS, MIXED, owned) for owned in ((0, 64), (64, 192))]
    for flat in (whole, *slices):
        for step in range(STEPS):
            flat.step(given_gradients(step), 0.01, 0.5)
    for moment in ("exp_avg", "exp_avg_sq"):
        of_whole = torch.cat([state[moment] for _, state in whole.state()])
        assert torch.equal(torch.cat([state[moment] for flat in slices for _, state in flat.state()]), of_whole)
        assert of_whole.shape == (192,)


# ---- Optimizers of whole tensors -------------------------------------------------------------------------------------

MATRICES = {"a": (6, 9), "b": (17,), "c": (8, 4), "d": (12, 12)}


@pytest.mark.parametrize("factor", [None, 0.37])
@pytest.mark.parametrize("decay", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adafactor_equals_torchs_on_plain_parameters(dtype, decay, factor):
    all_settings = [decaying(OptimizerSettings("adafactor", weight_decay=0.1), decay)]
    settings_of = dict.fromkeys(MATRICES, 0)
    flat = Flat(dtype, dtype, all_settings, settings_of, shapes=MATRICES)
    plain = copies(flat)
    both(flat, plain, all_settings, factor, settings_of)
    for name, parameter in plain.items():
        assert not torch.equal(parameter, copies(Flat(dtype, dtype, all_settings, settings_of, shapes=MATRICES))[name])
        torch.testing.assert_close(flat.parameters[name], parameter, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("factor", [None, 0.37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_muon_equals_torchs_on_matrices_and_adamw_updates_the_rest(dtype, factor):
    """Muon itself computes in bfloat16, which does not tell an update's last bits apart."""
    all_settings = [OptimizerSettings("muon", weight_decay=0.1, momentum=0.9), ADAMW]
    settings_of = {name: 0 if len(shape) == 2 else 1 for name, shape in MATRICES.items()}
    flat = Flat(dtype, dtype, all_settings, settings_of, shapes=MATRICES)
    plain = copies(flat)
    both(flat, plain, all_settings, factor, settings_of)
    for name, parameter in plain.items():
        torch.testing.assert_close(flat.parameters[name], parameter, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_masters_of_whole_tensors_are_updated_in_float32():
    all_settings = [OptimizerSettings("adafactor", weight_decay=0.1)]
    flat = Flat(torch.bfloat16, torch.float32, all_settings)
    plain = {name: nn.Parameter(parameter.detach().float()) for name, parameter in flat.parameters.items()}
    both(flat, plain, all_settings, 0.5)
    for name, parameter in plain.items():
        torch.testing.assert_close(flat.parameters[name], parameter.bfloat16(), rtol=2**-7, atol=1e-6)


def test_adafactor_keeps_a_row_and_a_column_of_each_matrix():
    flat = Flat(
        torch.float32, torch.float32, [OptimizerSettings("adafactor")], dict.fromkeys(MATRICES, 0), shapes=MATRICES
    )
    flat.step(given_gradients(0, MATRICES), 0.01, None)
    sizes = {piece.shape: sum(value.numel() for value in state.values()) for piece, state in flat.state()}
    assert sizes[12, 12] <= 12 + 12 + 1
    assert sizes[6, 9] <= 6 + 9 + 1


# ---- Overflow --------------------------------------------------------------------------------------------------------

EVERY_KIND = {
    "adamw": [ADAMW],
    "sgd": [SGD],
    "adafactor": [OptimizerSettings("adafactor", weight_decay=0.1)],
    "muon": [OptimizerSettings("muon", weight_decay=0.1)],
}


@pytest.mark.parametrize("factor", [None, 0.37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_an_overflow_leaves_parameters_masters_and_state_as_they_were(kind, dtype, factor):
    gradient_dtype = torch.float32 if dtype == torch.float16 else dtype
    shapes = {"a": (6, 9), "d": (12, 12)}
    flat = Flat(dtype, gradient_dtype, EVERY_KIND[kind], dict.fromkeys(shapes, 0), shapes=shapes)
    for step in range(2):
        flat.step(given_gradients(step, shapes), 0.01, factor, overflow=0.0)
    parameters, master, state = flat.flat.flat.clone(), flat.optimizer.master.clone(), flat.state()
    infinite = {name: torch.full(shape, torch.inf) for name, shape in shapes.items()}
    not_numbers = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for bad in (infinite, not_numbers):
        flat.step(bad, 0.01, factor, overflow=1.0)
        assert torch.equal(flat.flat.flat, parameters)
        assert torch.equal(flat.optimizer.master, master)
        for (_, before), (_, after) in zip(state, flat.state(), strict=True):
            assert before.keys() == after.keys()
            assert all(torch.equal(before[name], after[name]) for name in before)
    flat.step(given_gradients(2, shapes), 0.01, factor, overflow=0.0)
    assert not torch.equal(flat.optimizer.master, master)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_step_that_was_skipped_leaves_no_trace_in_those_that_follow(kind):
    """Bit by bit the same as without it: the number of steps has not grown either."""
    shapes = {"a": (6, 9), "d": (12, 12)}
    infinite = {name: torch.full(shape, torch.inf) for name, shape in shapes.items()}
    ends = []
    for skip in (False, True):
        flat = Flat(torch.float32, torch.float32, EVERY_KIND[kind], dict.fromkeys(shapes, 0), shapes=shapes)
        for step in range(4):
            if skip:
                flat.step(infinite, 0.5, 0.37, overflow=1.0)
            flat.step(given_gradients(step, shapes), 0.01, 0.37, overflow=0.0)
        ends.append(flat.flat.flat.clone())
    assert torch.equal(*ends)


@pytest.mark.parametrize("factor", [None, 0.37])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_verdict_that_all_is_well_changes_no_bit(kind, factor):
    shapes = {"a": (6, 9), "d": (12, 12)}
    ends = []
    for overflow in (None, 0.0):
        flat = Flat(torch.float32, torch.float32, EVERY_KIND[kind], dict.fromkeys(shapes, 0), shapes=shapes)
        for step in range(3):
            flat.step(given_gradients(step, shapes), 0.01, factor, overflow)
        ends.append(flat.flat.flat.clone())
    assert torch.equal(*ends)


def test_layouts_of_slices_divide_what_the_optimizer_updates():
    specs = [ParameterSpec(name, shape, 0, settings=MIXED[name]) for name, shape in SHAPES.items()]
    layout = lay_out(specs, bucket_bytes=1 << 20, gradient_itemsize=4, ownership=Ownership.SLICES, shards=3)
    owned = [list(pieces(layout.buckets[0], TWO_SETTINGS, layout.owned(0, shard))) for shard in range(3)]
    assert owned == [[Piece(0, 0, 64, (64,))], [Piece(0, 0, 64, (64,))], [Piece(1, 0, 64, (64,))]]
    assert layout.buckets[0].numel == 3 * ALIGNMENT
