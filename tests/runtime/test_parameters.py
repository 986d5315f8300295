"""Divided parameters are there when a model uses them, however it does, and gone otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from syncline.data.batch import MicroBatch
from syncline.modeling.pipeline.stage import Stage
from syncline.program.actions import Action, Backward, ClipGradients, Forward
from syncline.program.build import build_forward_program, build_program
from syncline.program.layout import ParameterLayout, ParameterSpec, lay_out
from syncline.program.verification.verify import verify
from syncline.runtime.buckets import Presence
from syncline.runtime.communication.collectives import Collectives
from syncline.runtime.communication.point_to_point import Transport
from syncline.runtime.optimization.optimizer import OptimizerSettings
from syncline.runtime.worker import Worker
from syncline.strategy import Sharding, Strategy, SyncMoment
from syncline.strategy.topology import Topology
from tests.groups import reused_groups
from tests.stand_ins import CPU, Weights, exact, micro_batch_of, start_worker, tokens

pytestmark = pytest.mark.ranks

FEATURES = 6
STEPS = 3
TIMEOUT = timedelta(seconds=60)


# ---- Models that use their parameters in different ways --------------------------------------------------------------


Uses = Mapping[str, tuple[int, int]]
"""The first and the last use of each layer, as the layout is told."""

IN_ORDER: Uses = {"a": (0, 0), "b": (1, 1), "c": (2, 2)}
AGAIN: Uses = {**IN_ORDER, "a": (0, 3)}


class Toy(nn.Module):
    """Three layers, a then b then c, from features to losses, both (batch, sequence, FEATURES)."""

    uses = IN_ORDER

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in "abc":
            self.add_module(name, nn.Linear(FEATURES, FEATURES, dtype=torch.float64))

    def layer(self, name: str) -> Callable[[Tensor], Tensor]:
        return self.get_submodule(name)

    def weight(self, name: str) -> Tensor:
        return self.get_parameter(f"{name}.weight")

    def forward(self, features: Tensor) -> Tensor:
        return self.layer("c")(self.layer("b")(self.layer("a")(features).sin()).sin())


class Lends(Toy):
    """The weight of the first layer is used at the end by itself, as a tied head is."""

    uses = AGAIN

    def forward(self, features: Tensor) -> Tensor:
        return functional.linear(super().forward(features).sin(), self.weight("a"))


class LendsTransposed(Lends):
    """Under another name for its values."""

    def forward(self, features: Tensor) -> Tensor:
        return Toy.forward(self, features).sin() @ self.weight("a").T


class LendsToo(Toy):
    """A layer that is not called: another reads its weight, its bias nobody."""

    def forward(self, features: Tensor) -> Tensor:
        hidden = functional.linear(self.layer("a")(features).sin(), self.weight("b")).sin()
        return self.layer("c")(hidden)


class LendsViews(Toy):
    def forward(self, features: Tensor) -> Tensor:
        upper, lower = self.weight("b").chunk(2)
        hidden = self.layer("a")(features).sin()
        return self.layer("c")(torch.cat([hidden @ upper.T, hidden @ lower.view(lower.shape).T], -1).sin())


class Twice(Toy):
    """The first layer is called again at the end."""

    uses = AGAIN

    def forward(self, features: Tensor) -> Tensor:
        return self.layer("a")(super().forward(features).sin())


class Unordered(Toy):
    """Layers are used in another order than the layout was told."""

    def forward(self, features: Tensor) -> Tensor:
        return self.layer("a")(self.layer("c")(self.layer("b")(features).sin()).sin())


class Partly(Toy):
    """A layer in the middle is left out when there are few features: in some micro-batches, on some ranks."""

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.layer("a")(features).sin()
        return self.layer("c")(self.layer("b")(hidden).sin() if features[..., 0].sum() > 2 else hidden)


class Recomputed(Toy):
    def forward(self, features: Tensor) -> Tensor:
        hidden = features
        for name in "abc":
            hidden = checkpoint(nn.Sequential(self.get_submodule(name), nn.Tanh()), hidden, use_reentrant=False)
        return hidden


class RecomputedLending(Toy):
    """Where something is recomputed that uses another layer's weight."""

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.layer("a")(features).sin()
        hidden = checkpoint(self._borrowing, hidden, self.weight("b"), use_reentrant=False)
        return self.layer("c")(hidden)

    @staticmethod
    def _borrowing(hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(hidden, weight).sin().cos()


class Wayward(Toy):
    """A layer is used again, and nobody was told."""

    def forward(self, features: Tensor) -> Tensor:
        return self.layer("a")(super().forward(features).sin())


class ToyStage(Stage):
    """A toy as the one stage of a model; its input are token ids."""

    def __init__(self, module: Toy) -> None:
        nn.Module.__init__(self)
        self.index, self.is_first, self.is_last = 0, True, True
        self.module = module

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    def forward(self, micro_batch: MicroBatch, hidden: Tensor | None = None) -> Tensor:
        features = functional.one_hot(micro_batch.input_ids % FEATURES, FEATURES).double()
        return self.module(features).square().sum()


def layout_of(module: Toy, strategy: Strategy) -> ParameterLayout:
    specs = [
        ParameterSpec(
            name,
            tuple(parameter.shape),
            0,
            block=name[0],
            first_use=module.uses[name[0]][0],
            last_use=module.uses[name[0]][1],
        )
        for name, parameter in module.named_parameters()
    ]
    return lay_out(
        specs,
        bucket_bytes=2 * 64 * 8,
        gradient_itemsize=8,
        ownership=strategy.ownership,
        shards=strategy.shards,
        divide_parameters=strategy.divides_parameters,
    )


def start_toy(rank: int, kind: type[Toy], strategy: Strategy) -> Worker:
    stage = ToyStage(kind())
    program = build_program(strategy, layout_of(stage.module, strategy), activation_bytes=0)
    verify(program)
    collectives = Collectives([program], rank, torch.float64, TIMEOUT)
    return Worker(
        rank,
        {0: stage},
        program,
        collectives,
        Transport([program], strategy.shape_exchange, CPU, collectives.traffic, TIMEOUT),
        gradient_dtype=torch.float64,
        all_settings=[OptimizerSettings("adamw", weight_decay=0.1)],
        max_gradient_norm=0.0,
        device=CPU,
    )


def batch(rank: int, step: int, k: int) -> list[MicroBatch]:
    """`k` micro-batches of different lengths."""
    found = []
    for index in range(k):
        generator = torch.Generator().manual_seed(100 * step + 10 * rank + index)
        ids = torch.randint(0, FEATURES, (2, 3 + index), generator=generator)
        found.append(MicroBatch(ids, ids, torch.zeros_like(ids)))
    return found


def strategy_of(sharding: Sharding, **decisions: Any) -> Strategy:
    topology = Topology(dp=2) if sharding is Sharding.NONE else Topology(sharding=2)
    return exact(Strategy(topology=topology, micro_batches=2, sharding=sharding, **decisions))


def trained(rank: int, kind: type[Toy], strategy: Strategy) -> dict[str, Tensor]:
    worker = start_toy(rank, kind, strategy)
    for step in range(STEPS):
        worker.step(batch(rank, step, strategy.micro_batches), 0.01)
    with worker.parameters.whole():
        return {name: p.detach().clone() for name, p in worker.stages[0].parameters_by_name().items()}


def against_replicas(rank: int, world_size: int, kind: type[Toy], forms: Mapping[str, Strategy]) -> list[str]:
    """In which of the forms the parameters differ, in any bit, from those of plain replicas."""
    with reused_groups() as groups:
        expected = trained(rank, kind, strategy_of(Sharding.NONE))
        different = []
        for name, strategy in forms.items():
            groups.next_run()
            found = trained(rank, kind, strategy)
            different += [f"{name}: {key}" for key in expected if not torch.equal(found[key], expected[key])]
    return different


FORMS = {
    "stage 1 by tensors": strategy_of(Sharding.STAGE1_TENSOR),
    "stage 1 by slices": strategy_of(Sharding.STAGE1_SLICE),
    "stage 2": strategy_of(Sharding.STAGE2),
    "stage 3": strategy_of(Sharding.STAGE3),
    "stage 3, not overlapped": strategy_of(Sharding.STAGE3, overlap=False),
    "stage 3, released": strategy_of(Sharding.STAGE3, release_gradients=True),
    "stage 3, after accumulation": strategy_of(Sharding.STAGE3, sync=SyncMoment.AFTER_ACCUMULATION, overlap=False),
}

WAYS = [Toy, Lends, LendsTransposed, LendsToo, Twice, Unordered, Partly, Recomputed]


@pytest.mark.parametrize(
    "kind",
    [
        *WAYS,
        LendsViews,
        RecomputedLending,
    ],
)
def test_however_a_model_uses_its_parameters_it_trains_as_replicas_do(pool, kind):
    """With two ranks a sum has one order, so the bits are the same."""
    assert pool.run(2, against_replicas, kind, FORMS, timeout=120.0) == [[], []]


# ---- Storage ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Storages:
    """Bytes of each bucket's storage on one rank, in the order of the layout."""

    before: list[int]
    around: dict[str, list[int]]
    after: list[int]
    peak: int
    whole: list[int]


def storages_of(rank: int, world_size: int) -> Storages:
    worker = start_toy(rank, Toy, strategy_of(Sharding.STAGE3))
    buckets = worker.parameters.buckets.values()

    def sizes() -> list[int]:
        return [bucket.flat.untyped_storage().nbytes() for bucket in buckets]

    inside: dict[str, list[int]] = {}

    def observe(action: Action) -> None:
        inside[str(action)] = sizes()

    def note(name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        inside.setdefault(f"in {name}", sizes())

    for name in "abc":
        module = worker.stages[0].get_submodule(f"module.{name}")
        module.register_forward_hook(partial(note, name))
    before = sizes()
    result = worker.step(batch(rank, 0, 2), 0.01, observe)
    after = sizes()
    with worker.parameters.whole():
        whole = sizes()
    assert sizes() == after
    for bucket in buckets:
        for parameter in bucket.parameters:
            assert parameter.untyped_storage().nbytes() == 0
    return Storages(before, inside, after, result.peak_gathered_bytes, whole)


def test_only_what_is_in_use_and_what_comes_next_has_storage(pool):
    """Buckets 0, 1 and 2 hold the layers c, b and a; a gather has its storage from its start."""
    size = 2 * 64 * 8
    for found in pool.run(2, storages_of):
        assert found.before == found.after == [0, 0, 0]
        assert found.whole == [size] * 3
        assert found.around["in a"] == [0, size, size]
        assert found.around["in b"] == [size, size, 0]
        assert found.around["in c"] == [size, 0, 0]
        assert found.around[str(Forward(0, 0))] == [size, 0, 0], "the backward begins with it"
        assert found.around[str(Backward(0, 0))] == [0, 0, size], "the next forward begins with it"
        assert found.peak == 2 * size


def owned_parts(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    worker = start_toy(rank, Toy, strategy_of(Sharding.STAGE3))
    worker.step(batch(rank, 0, 2), 0.01)
    buckets = worker.parameters.buckets.values()
    owned = [bucket.owned.clone() for bucket in buckets]
    with worker.parameters.whole():
        return owned, [bucket.flat.clone() for bucket in buckets]


def test_each_rank_keeps_its_slice_of_what_all_gather(pool):
    (first, whole), (second, same) = pool.run(2, owned_parts)
    for mine, theirs, flat, other in zip(first, second, whole, same, strict=True):
        assert torch.equal(torch.cat([mine, theirs]), flat)
        assert torch.equal(flat, other)


# ---- Uses out of turn ------------------------------------------------------------------------------------------------


def use_out_of_turn(rank: int, world_size: int) -> str:
    worker = start_toy(rank, Wayward, strategy_of(Sharding.STAGE3))
    with pytest.raises(RuntimeError) as error:
        worker.step(batch(rank, 0, 2), 0.01)
    return str(error.value)


def test_a_use_of_what_has_been_freed_is_told_with_its_names_and_what_to_do(pool):
    for message in pool.run(2, use_out_of_turn):
        assert message.startswith(
            "the parameters of bucket 2 (a.bias, a.weight, ...) are used when they have been freed"
        )
        assert "Write sharding: stage2" in message


def use_between_steps(rank: int, world_size: int) -> str:
    worker = start_toy(rank, Toy, strategy_of(Sharding.STAGE3))
    worker.step(batch(rank, 0, 2), 0.01)
    with pytest.raises(RuntimeError) as error:
        worker.stages[0](batch(rank, 0, 1)[0])
    with worker.parameters.whole():
        assert worker.stages[0](batch(rank, 0, 1)[0]).isfinite()
    return str(error.value)


def test_a_use_between_steps_is_told_too_unless_everything_was_gathered(pool):
    for message in pool.run(2, use_between_steps):
        assert "are used when they have been freed or not been gathered yet" in message


# ---- Evaluation in the midst of a step -------------------------------------------------------------------------------


def evaluated_in_the_midst(rank: int, strategy: Strategy, at: Action | None) -> tuple[Any, list[float]]:
    """What a rank has after two steps, in both of which it has evaluated behind the action `at`; the losses found."""
    model = Weights(stages=(("a", "b", "c"),), elements=3)
    worker = start_worker(rank, strategy, model)
    program = build_forward_program(strategy, model.layout(strategy), 2, activation_bytes=0)
    all_used = [*tokens(1.0, weight=0), *tokens(2.0, weight=1), *tokens(0.5, weight=2)]
    some_used = tokens(3.0, -1.0, weight=rank)
    losses = []

    def observe(action: Action) -> None:
        if action == at or (isinstance(at, ClipGradients) and isinstance(action, ClipGradients)):
            losses.append(float(worker.evaluate(program, [micro_batch_of(all_used)] * 2).loss))

    steps = [[all_used, some_used], [some_used, all_used]]
    results = [worker.step([micro_batch_of(given) for given in step], 0.125, observe) for step in steps]
    with worker.parameters.whole():
        weights = {name: weight.tolist() for name, weight in worker.stages[0].parameters_by_name().items()}
    facts = [(float(result.loss), float(result.gradient_norm or 0.0), result.tokens) for result in results]
    presences = {bucket.presence for bucket in worker.parameters.buckets.values()}
    assert presences == {Presence.OWNED if strategy.divides_parameters else Presence.WHOLE}
    return (weights, facts), losses


MOMENTS: dict[str, Action] = {
    "before the first backward": Forward(0, 0),
    "between micro-batches": Backward(0, 0),
    "in the second forward": Forward(0, 1),
    "behind the last backward": Backward(0, 1),
    "behind the norm": ClipGradients((), ""),
}

EVALUATED = {
    name: exact(replace(strategy, topology=Topology(sharding=2), micro_batches=2))
    for name, strategy in {
        **FORMS,
        "replicas": replace(strategy_of(Sharding.NONE), topology=Topology(dp=2)),
        "stage 2, every micro-batch": strategy_of(Sharding.STAGE2, sync=SyncMoment.EVERY_MICRO_BATCH),
    }.items()
}
EVALUATED["replicas"] = replace(EVALUATED["replicas"], topology=Topology(dp=2))
EVALUATED["stage 3, one bucket"] = exact(EVALUATED["stage 3"], bucket_bytes=1 << 20)
"""Of one bucket nothing is gathered within a computation, unless it comes anew."""


def in_the_midst(rank: int, world_size: int, strategy: Strategy) -> list[str]:
    """At which moments an evaluation changes something, or finds a wrong loss."""
    wrong = []
    with reused_groups() as groups:
        undisturbed, _ = evaluated_in_the_midst(rank, strategy, None)
        for name, action in MOMENTS.items():
            groups.next_run()
            found, losses = evaluated_in_the_midst(rank, strategy, action)
            # 3 elements of weight 1 in each; then 2 replicas, 2 micro-batches.
            right = len(losses) == 2 and losses[0] == 2 * 2 * 3 * (1.0 + 2.0 + 0.5)
            if found != undisturbed or not right:
                wrong.append(name)
    return wrong


@pytest.mark.parametrize("form", EVALUATED)
def test_an_evaluation_in_the_midst_of_a_step_changes_no_bit_of_it(pool, form):
    assert pool.run(2, in_the_midst, EVALUATED[form]) == [[], []]
