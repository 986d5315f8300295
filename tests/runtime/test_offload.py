"""What forwards save waits in host memory, and comes back bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from syncline.modeling.checks import run_chained
from syncline.modeling.kernels.loss import token_loss_sum
from syncline.modeling.recompute import enable_recompute
from syncline.program.actions import Action, Forward
from syncline.runtime import offload
from syncline.runtime.offload import Copy, Offload
from tests.modeling.families import assert_same, random_micro_batch, tiny_config, tiny_stages
from tests.runtime.pipelines import start_forwards_first, step
from tests.stand_ins import CPU

WIDTH = 8
ROW_BYTES = 4 * WIDTH


class SlowCopy:
    """Happens when it is waited for."""

    def __init__(self, lane: SlowLane, target: Tensor, source: Tensor) -> None:
        self.lane = lane
        self.tensors: tuple[Tensor, Tensor] | None = (target, source)

    def is_done(self) -> bool:
        return self.tensors is None

    def wait(self) -> None:
        if self.tensors is not None:
            (target, source), self.tensors = self.tensors, None
            target.data.copy_(source)
            self.lane.bytes_under_way -= source.nbytes


class SlowLane:
    def __init__(self) -> None:
        self.bytes_under_way = self.most_under_way = self.copies = 0
        self.started: list[SlowCopy] = []

    def copy(self, target: Tensor, source: Tensor) -> Copy:
        self.copies += 1
        self.bytes_under_way += source.nbytes
        self.most_under_way = max(self.most_under_way, self.bytes_under_way)
        copy = SlowCopy(self, target, source)
        self.started.append(copy)
        return copy

    def finish(self) -> None:
        for copy in self.started:
            copy.wait()


def chain(weights: list[Tensor], rows: Tensor, watch: Callable[[Tensor], object] = lambda saved: None) -> Tensor:
    """Each result of `tanh` is saved twice: by itself, and by the product that reads it."""
    for weight in weights:
        rows = (rows @ weight).tanh()
        watch(rows)
    return rows.square().sum()


def some_weights(count: int) -> list[Tensor]:
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5) for _ in range(count)]


def expected_gradients(weights: list[Tensor], rows: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(chain(weights, rows), weights)


def assert_bitwise(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class TestStorages:
    def test_each_moves_once_and_goes_from_the_device(self):
        weights, rows = some_weights(4), torch.randn(3, WIDTH)
        saved: list[StorageWeakRef] = []
        moving = Offload(CPU, weights)
        with moving.taking([rows]):
            loss = chain(weights, rows, lambda tensor: saved.append(StorageWeakRef(tensor.untyped_storage())))
        assert all(storage.expired() for storage in saved)
        assert moving.memory.held == len(saved) * 3 * ROW_BYTES
        assert_bitwise(torch.autograd.grad(loss, weights), expected_gradients(weights, rows))
        assert moving.memory.held == 0

    def test_views_come_back_as_they_were(self):
        weight, rows = some_weights(1)[0], torch.randn(6, WIDTH)

        def compute() -> Tensor:
            product = rows @ weight
            return (product[1:5:2].t() * product.t()[:, ::3].exp()).sum()

        moving = Offload(CPU, [weight])
        with moving.taking([rows]):
            loss = compute()
        assert moving.memory.held == 6 * ROW_BYTES + 2 * ROW_BYTES, "the product, and what exp returned"
        assert_bitwise(torch.autograd.grad(loss, [weight]), torch.autograd.grad(compute(), [weight]))

    def test_parameters_and_what_was_received_stay(self):
        weight, rows = some_weights(1)[0], torch.randn(3, WIDTH)
        moving = Offload(CPU, [weight])
        with moving.taking([rows]):
            loss = (rows @ weight.t()).sum()
        assert moving.memory.held == 0
        assert_bitwise(torch.autograd.grad(loss, [weight]), torch.autograd.grad((rows @ weight.t()).sum(), [weight]))

    def test_a_graph_that_is_dropped_leaves_nothing(self):
        weights, rows = some_weights(3), torch.randn(3, WIDTH)
        moving = Offload(CPU, weights)
        with moving.taking([rows]):
            loss = chain(weights, rows)
        assert moving.memory.held > 0
        del loss
        assert moving.memory.held == 0

    def test_an_address_that_is_used_again_is_another_storage(self):
        """On the CPU a storage is freed as soon as it is copied, and the next one may take its place."""
        weights, rows = some_weights(50), torch.randn(3, WIDTH)
        moving = Offload(CPU, weights)
        with moving.taking([rows]):
            loss = chain(weights, rows)
        assert moving.memory.held == 50 * 3 * ROW_BYTES
        assert_bitwise(torch.autograd.grad(loss, weights), expected_gradients(weights, rows))

    @pytest.mark.parametrize("resident", [True, False])
    def test_what_changes_in_place_behind_its_forward_is_found(self, resident):
        weight, rows = some_weights(1)[0], torch.randn(3, WIDTH)
        moving = Offload(CPU, [weight] if resident else [], leaving=SlowLane())
        with moving.taking():
            loss = (rows @ (weight if resident else weight * 1.0)).exp().sum() + (rows.requires_grad_() @ weight).sum()
        with torch.no_grad():
            weight.add_(1.0)
        with pytest.raises(RuntimeError, match=r"a tensor of shape \(8, 8\) was changed in place"):
            loss.backward()

    def test_what_a_backward_writes_over_is_no_longer_what_was_saved(self):
        weight, rows = some_weights(1)[0], torch.randn(3, WIDTH)
        moving = Offload(CPU, [weight])
        with moving.taking([rows]):
            logits = rows @ weight
            loss = token_loss_sum(logits, torch.tensor([1, 2, 3]), consume_logits=True)
            read_too = logits.square().sum()
        del logits
        loss.backward()
        with pytest.raises(RuntimeError, match=r"a tensor of shape \(3, 8\) was changed in place"):
            read_too.backward()


class TestCopiesUnderWay:
    LAYERS = 12

    @pytest.mark.parametrize("most", [1, 3, 100])
    def test_neither_direction_holds_more_than_it_may(self, monkeypatch, most):
        size = 3 * ROW_BYTES
        monkeypatch.setattr(offload, "UNDER_WAY_BYTES", most * size)
        leaving, coming = SlowLane(), SlowLane()
        weights, rows = some_weights(self.LAYERS), torch.randn(3, WIDTH)
        moving = Offload(CPU, weights, leaving=leaving, coming=coming)
        with moving.taking([rows]):
            loss = chain(weights, rows)
        assert leaving.copies == self.LAYERS
        # One more has just been started when the oldest is waited for.
        assert leaving.most_under_way == min(most + 1, self.LAYERS) * size
        assert_bitwise(torch.autograd.grad(loss, weights), expected_gradients(weights, rows))
        # What had not left when the backward came was used where it was.
        assert coming.copies == max(0, self.LAYERS - most)
        # The next ones are on their way when the first is waited for.
        assert coming.most_under_way == (most + 1 if coming.copies else 0) * size

    def test_what_has_left_since_the_backward_began_is_not_fetched_again(self, monkeypatch):
        """Of what is still leaving the backward takes hold as it passes."""
        monkeypatch.setattr(offload, "UNDER_WAY_BYTES", 6 * 3 * ROW_BYTES)
        leaving, coming = SlowLane(), SlowLane()
        weights, rows = some_weights(self.LAYERS), torch.randn(3, WIDTH)
        moving = Offload(CPU, weights, leaving=leaving, coming=coming)
        with moving.taking([rows]):
            loss = chain(weights, rows)
        weights[-1].register_hook(lambda gradient: leaving.finish())
        assert_bitwise(torch.autograd.grad(loss, weights), expected_gradients(weights, rows))
        assert coming.copies == self.LAYERS - 6

    def test_nothing_is_kept_for_copies_that_nobody_waits_for(self):
        leaving, coming = SlowLane(), SlowLane()
        weights, rows = some_weights(self.LAYERS), torch.randn(3, WIDTH)
        moving = Offload(CPU, weights, leaving=leaving, coming=coming)
        saved: list[StorageWeakRef] = []
        with moving.taking([rows]):
            loss = chain(weights, rows, lambda tensor: saved.append(StorageWeakRef(tensor.untyped_storage())))
        loss.backward()
        assert not any(storage.expired() for storage in saved), "they are still being copied"
        moving.settle(everything=True)
        assert all(storage.expired() for storage in saved)
        assert leaving.bytes_under_way == coming.bytes_under_way == 0

    def test_one_that_is_larger_than_all_that_may_be_does_not_hold_up_its_forward(self, monkeypatch):
        monkeypatch.setattr(offload, "UNDER_WAY_BYTES", 1)
        leaving = SlowLane()
        weights, rows = some_weights(1), torch.randn(3, WIDTH)
        with Offload(CPU, weights, leaving=leaving).taking([rows]):
            loss = chain(weights, rows)
        assert leaving.bytes_under_way == 3 * ROW_BYTES
        assert_bitwise(torch.autograd.grad(loss, weights), expected_gradients(weights, rows))

    def test_a_backward_in_another_order_gets_what_it_asks_for(self, monkeypatch):
        monkeypatch.setattr(offload, "UNDER_WAY_BYTES", 2 * 3 * ROW_BYTES)
        weights, rows = some_weights(self.LAYERS), torch.randn(3, WIDTH)
        coming = SlowLane()

        def two_losses() -> list[Tensor]:
            return [chain(half, rows) for half in (weights[: self.LAYERS // 2], weights[self.LAYERS // 2 :])]

        moving = Offload(CPU, weights, coming=coming)
        with moving.taking([rows]):
            first, second = two_losses()
        gradients = [*torch.autograd.grad(first, weights[: self.LAYERS // 2])]
        assert coming.copies == self.LAYERS // 2, "of the other loss nothing has come"
        gradients += torch.autograd.grad(second, weights[self.LAYERS // 2 :])
        assert_bitwise(tuple(gradients), torch.autograd.grad(torch.stack(two_losses()).sum(), weights))
        assert moving.memory.held == 0


@pytest.mark.parametrize("recompute", [None, "full", "full_attn"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "qwen3_moe"])
def test_no_gradient_of_a_model_changes(family, recompute):
    config = tiny_config(family, layers=4)
    micro_batch = random_micro_batch()
    found = []
    for offloads in (False, True):
        (stage,) = tiny_stages(config, 1)
        if recompute:
            enable_recompute(stage.model, recompute)
        moving = Offload(CPU, [*stage.parameters(), *stage.buffers()])
        if offloads:
            let_move(stage, moving)
        found.append(run_chained([stage], micro_batch))
        assert (moving.memory.peak > 0) == offloads
        assert moving.memory.held == 0
    assert_same(found[1], found[0], tolerance=0)


def let_move(stage: nn.Module, moving: Offload) -> None:
    forward = stage.forward

    def run(*inputs: Any) -> Tensor:
        with moving.taking():
            return forward(*inputs)

    stage.forward = run


@pytest.mark.parametrize("granularity", ["full", "full_attn"])
def test_what_is_computed_again_from_waits_in_host_memory_too(granularity):
    """The input of every recomputed layer, or attention, whether it comes by position or by name."""
    (stage,) = tiny_stages(tiny_config("llama", layers=4), 1)
    enable_recompute(stage.model, granularity)
    inputs: list[StorageWeakRef] = []

    def watch(module: nn.Module, positional: tuple, named: dict) -> None:
        hidden = positional[0] if positional else named["hidden_states"]
        inputs.append(StorageWeakRef(hidden.untyped_storage()))

    for layer in stage.model.model.layers:
        watched = layer if granularity == "full" else layer.self_attn
        watched.register_forward_pre_hook(watch, with_kwargs=True)
    moving = Offload(CPU, [*stage.parameters(), *stage.buffers()])
    with moving.taking():
        loss = stage(random_micro_batch())
    assert len(inputs) == 4
    assert all(storage.expired() for storage in inputs)
    loss.backward()


def activations_alive_on_rank(rank: int, world_size: int, offloads: bool) -> tuple[list[int], int, int]:
    """After each forward of how many micro-batches an activation is still on the device; and what has waited in host
    memory at most, and what is left there.
    """
    engine = start_forwards_first(rank, 4, offload_activations=offloads)
    saved: list[StorageWeakRef] = []
    alive: list[int] = []
    (stage,) = engine.stages

    def keep_watch(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        saved.append(StorageWeakRef(inputs[0].untyped_storage()))

    def after(action: Action) -> None:
        if isinstance(action, Forward):
            alive.append(sum(not storage.expired() for storage in saved))

    for name, module in stage.model.named_modules():
        if name.endswith("down_proj"):
            module.register_forward_pre_hook(keep_watch)
    result = step(engine, after)
    return alive, result.peak_offloaded_bytes, engine.worker.offload.memory.held


@pytest.mark.ranks
def test_between_forward_and_backward_nothing_of_a_micro_batch_is_on_the_device(pool):
    for alive, offloaded, left in pool.run(2, activations_alive_on_rank, True):
        assert alive == [0, 0, 0, 0]
        assert offloaded > 0
        assert left == 0
    for alive, offloaded, _ in pool.run(2, activations_alive_on_rank, False):
        assert alive == [1, 2, 3, 4]
        assert offloaded == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="moves what is on a GPU")
@pytest.mark.parametrize("recompute", [None, "full"])
def test_on_a_gpu_less_is_held_and_no_bit_changes(recompute):
    device = torch.device("cuda")
    config = tiny_config("llama", layers=8)
    config._attn_implementation = "eager"  # Others add in no fixed order.
    found, held, peaks = [], [], []
    for offloads in (False, True):
        (stage,) = tiny_stages(config, 1, dtype=torch.float32)
        if recompute:
            enable_recompute(stage.model, recompute)
        stage.to(device)
        moving = Offload(device, [*stage.parameters(), *stage.buffers()])
        torch.manual_seed(0)
        hidden = torch.randn(8, 512, config.hidden_size, device=device, requires_grad=True)
        before = torch.cuda.memory_allocated(device)
        layers, losses = stage.model.model.layers, []
        positions = stage.model.model.rotary_emb(hidden, torch.arange(512, device=device)[None])
        for _ in range(3):
            context = moving.taking([hidden]) if offloads else torch.enable_grad()
            with context:
                output = hidden
                for layer in layers:
                    output = layer(output, position_embeddings=positions)
                losses.append(output.float().square().sum())
            del output
        torch.cuda.synchronize()
        moving.settle()
        held.append(torch.cuda.memory_allocated(device) - before)
        torch.cuda.reset_peak_memory_stats(device)
        for loss in losses:
            loss.backward()
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
        found.append([p.grad for layer in layers for p in layer.parameters()])
    assert held[1] < held[0] / 2
    assert peaks[1] < peaks[0]
    assert_bitwise(tuple(found[1]), tuple(found[0]))
