"""Models whose gradients are given, for tests of what happens to a gradient; and real ranks that train them.

A token names a weight and the gradient that it gives to every element of it. Its loss is that gradient times the sum of
the weight's elements, so a step's right outcome can be worked out by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
from torch import Tensor, nn

from syncline.data.batch import IGNORED_LABEL, MicroBatch
from syncline.modeling.pipeline.stage import Stage
from syncline.program.build import ITEMSIZE, build_program
from syncline.program.layout import ParameterLayout, ParameterSpec, lay_out
from syncline.program.program import Program
from syncline.program.verification.verify import verify
from syncline.runtime.communication.collectives import Collectives
from syncline.runtime.communication.point_to_point import Transport
from syncline.runtime.optimization.optimizer import OptimizerSettings
from syncline.runtime.worker import Worker
from syncline.strategy import Sharding, Strategy, SyncMoment
from tests.groups import reused_groups

UNIT = 1 / 16
"""Given gradients are multiples of it."""

CPU = torch.device("cpu")
SGD = OptimizerSettings("sgd")


@dataclass(frozen=True)
class Token:
    """One token: `gradient` for each element of the weight of index `weight`, unless it is masked."""

    gradient: float
    weight: int = 0
    masked: bool = False


Tokens = Sequence[Token]
"""One micro-batch."""


def tokens(*gradients: float, weight: int = 0) -> list[Token]:
    return [Token(gradient, weight) for gradient in gradients]


def masked(*gradients: float, weight: int = 0) -> list[Token]:
    return [Token(gradient, weight, masked=True) for gradient in gradients]


@dataclass(frozen=True)
class Weights:
    """A model: the weights of each stage, all of them 1 at first; their indices count through all stages."""

    stages: tuple[tuple[str, ...], ...] = (("weight",),)
    tied: Mapping[str, str] = field(default_factory=dict)
    """Later copy -> first copy."""
    elements: int = 1
    """Of each weight."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for names in self.stages for name in names)

    def layout(self, strategy: Strategy) -> ParameterLayout:
        specs = [
            ParameterSpec(
                name, (self.elements,), stage, tied_to=self.tied.get(name), block=name, first_use=use, last_use=use
            )
            for use, (stage, name) in enumerate((s, name) for s, names in enumerate(self.stages) for name in names)
        ]
        return lay_out(
            specs,
            bucket_bytes=strategy.bucket_bytes,
            gradient_itemsize=ITEMSIZE[strategy.gradient_dtype],
            ownership=strategy.ownership,
            shards=strategy.shards,
            divide_parameters=strategy.divides_parameters,
        )


class GivenGradients(Stage):
    """One stage of `Weights`. Stages hand on the losses of the tokens so far, shape (1, tokens)."""

    def __init__(self, model: Weights, index: int, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.index = index
        self.is_first = index == 0
        self.is_last = index == len(model.stages) - 1
        self.first_weight = sum(len(names) for names in model.stages[:index])
        self.names = model.stages[index]
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(model.elements, dtype=dtype)) for _ in self.names)

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        return dict(zip(self.names, self.weights, strict=True))

    def forward(self, micro_batch: MicroBatch, hidden: Tensor | None = None) -> Tensor:
        gradients = (micro_batch.input_ids * UNIT).to(self.weights[0].dtype)
        losses = torch.zeros_like(gradients) if hidden is None else hidden
        for index, weight in enumerate(self.weights, self.first_weight):
            own = micro_batch.position_ids == index
            if own.any():  # A weight that no token names is not part of the graph.
                losses = losses + gradients * own * weight.sum()
        return losses[micro_batch.labels != IGNORED_LABEL].sum() if self.is_last else losses


def micro_batch_of(given: Tokens) -> MicroBatch:
    sixteenths = [token.gradient / UNIT for token in given]
    assert all(value == int(value) for value in sixteenths), "no multiple of the unit"
    labels = [IGNORED_LABEL if token.masked else 0 for token in given]
    weights = [token.weight for token in given]
    gradients = [int(value) for value in sixteenths]
    return MicroBatch(torch.tensor([gradients]), torch.tensor([labels]), torch.tensor([weights]))


@dataclass(frozen=True)
class Run:
    """A model, what its ranks are given, and how they train it."""

    steps: Sequence[Sequence[Sequence[Tokens]]]
    """[step][replica][micro-batch]"""
    strategy: Strategy
    model: Weights = field(default_factory=Weights)
    optimizer: OptimizerSettings = SGD
    learning_rate: float = 0.5
    max_gradient_norm: float = 0.0
    loss_scale: float = 1.0
    """To begin with, where the strategy scales losses up."""


@dataclass(frozen=True)
class Outcome:
    """One rank after its last step."""

    weights: dict[str, list[float]]
    losses: list[float]
    norms: list[float]
    skipped: list[bool]
    tokens: list[int]
    loss_scales: list[float]
    moments: dict[str, float]
    """The largest first and second moment, and the number of updates, where the optimizer has any."""


def exact(strategy: Strategy, *, bucket_bytes: int = 1) -> Strategy:
    """The same strategy in float64, with a bucket for each parameter unless `bucket_bytes` is larger."""
    return replace(
        strategy,
        parameter_dtype="float64",
        gradient_dtype="float64",
        reduce_dtype="float64",
        bucket_bytes=bucket_bytes,
    )


def policies(strategy: Strategy) -> dict[str, Strategy]:
    """Every way in which an option may lead the same gradients to the same end, in float64.

    Where the topology has a sharding group, under every form of sharding: each with a share of the ways, all of which
    meet some.
    """
    if strategy.topology.sharding > 1 and strategy.sharding is Sharding.NONE:
        share = 5 * strategy.topology.dp
        return {
            f"{form} {name}": policy
            for number, (form, sharded) in enumerate(sharding_forms(strategy).items())
            for index, (name, policy) in enumerate(policies(sharded).items())
            if index % share == number * 3 % share
        }
    found = {}
    for sync in SyncMoment:
        for overlap in (False, True) if sync is not SyncMoment.AFTER_ACCUMULATION else (False,):
            for average in (False, True):
                for delay in (False, True):
                    for release in (False, True):
                        name = f"{sync.value} {overlap=} {average=} {delay=} {release=}"
                        found[name] = exact(
                            replace(
                                strategy,
                                sync=sync,
                                overlap=overlap,
                                average_in_collective=average,
                                delay_loss_scale=delay,
                                release_gradients=release,
                            )
                        )
    return found


def sharding_forms(strategy: Strategy) -> dict[str, Strategy]:
    """The strategy with everything that sharding may divide."""
    forms = {form.value: replace(strategy, sharding=form) for form in Sharding if form is not Sharding.NONE}
    for form in (Sharding.STAGE1_TENSOR, Sharding.STAGE1_SLICE):
        forms[f"{form.value}, freed"] = replace(strategy, sharding=form, free_in_communication=True)
    return forms


def start_worker(
    rank: int,
    strategy: Strategy,
    model: Weights,
    *,
    optimizer: OptimizerSettings = SGD,
    max_gradient_norm: float = 0.0,
    loss_scale: float = 1.0,
    timeout: timedelta = timedelta(seconds=30),
    evaluation: Program | None = None,
) -> Worker:
    """As `syncline.training.engine` starts one; without peers it needs no process group. `evaluation` is to run
    beside steps.
    """
    program: Program = build_program(strategy, model.layout(strategy), activation_bytes=0)
    verify(program)
    beside = [evaluation] if evaluation is not None else []
    collectives = Collectives([program, *beside], rank, getattr(torch, strategy.reduce_dtype), timeout)
    transport, *of_evaluation = (
        Transport([each], strategy.shape_exchange, CPU, collectives.traffic, timeout) for each in (program, *beside)
    )
    dtype = getattr(torch, strategy.parameter_dtype)
    return Worker(
        rank,
        {stage: GivenGradients(model, stage, dtype) for stage in program.stages(rank)},
        program,
        collectives,
        transport,
        gradient_dtype=getattr(torch, strategy.gradient_dtype),
        all_settings=[optimizer],
        loss_scale=loss_scale,
        max_gradient_norm=max_gradient_norm,
        device=CPU,
        timers=strategy.timers,
        evaluation_transport=of_evaluation[0] if of_evaluation else None,
    )


def train(rank: int, run: Run) -> Outcome:
    """This rank's part of a run."""
    worker = start_worker(
        rank,
        run.strategy,
        run.model,
        optimizer=run.optimizer,
        max_gradient_norm=run.max_gradient_norm,
        loss_scale=run.loss_scale,
    )
    replica = run.strategy.topology.replica(rank)
    results = [worker.step([micro_batch_of(given) for given in step[replica]], run.learning_rate) for step in run.steps]
    with worker.parameters.whole():
        weights = {
            name: weight.tolist()
            for stage in worker.stages.values()
            for name, weight in stage.parameters_by_name().items()
        }
    return Outcome(
        weights=weights,
        losses=[float(result.loss) for result in results],
        norms=[float(result.gradient_norm) for result in results if result.gradient_norm is not None],
        skipped=[result.skipped for result in results],
        tokens=[result.tokens for result in results],
        loss_scales=[result.loss_scale for result in results],
        moments=_moments(worker),
    )


def train_all(rank: int, world_size: int, runs: Mapping[str, Run]) -> dict[str, Outcome]:
    """One run after another on the same ranks; what goes wrong says in which."""
    outcomes = {}
    with reused_groups() as groups:
        for name, run in runs.items():
            assert run.strategy.topology.world_size == world_size
            groups.next_run()
            try:
                outcomes[name] = train(rank, run)
            except Exception as error:
                raise RuntimeError(f"in the run [{name}]") from error
    return outcomes


def _moments(worker: Worker) -> dict[str, float]:
    """The largest value of every kind of optimizer state."""
    largest: dict[str, float] = {}
    for optimizer in worker.optimizers.values():
        for _, state in optimizer.state():
            for name, value in state.items():
                largest[name] = max(largest.get(name, 0.0), float(value.abs().max()))
    return largest
