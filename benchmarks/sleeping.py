"""A training step whose computations sleep: so cores do not matter, and the order of work does.

All else is what a training step does: the program, the messages, the gradients, their reductions, the update.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from syncline.data.batch import MicroBatch
from syncline.modeling.kernels.linear import Take
from syncline.modeling.pipeline.stage import Stage
from syncline.program.build import build_program
from syncline.program.layout import ParameterSpec, lay_out
from syncline.program.program import Program
from syncline.program.verification.verify import verify
from syncline.runtime.communication.collectives import Collectives
from syncline.runtime.communication.point_to_point import Transport
from syncline.runtime.optimization.optimizer import OptimizerSettings
from syncline.runtime.worker import Worker
from syncline.strategy import ShapeExchange, Strategy

TIMEOUT = timedelta(seconds=60)
CPU = torch.device("cpu")


def sleeping_program(strategy: Strategy, layers: int = 1, elements: int = 1) -> Program:
    """The step of stages with so many layers, each with one parameter of so many elements, in a bucket each."""
    names = [(stage, layer) for stage in range(strategy.placement.stages) for layer in range(layers)]
    specs = [
        ParameterSpec(_name(stage, layer), (elements,), stage, first_use=layer, last_use=layer)
        for stage, layer in names
    ]
    layout = lay_out(specs, bucket_bytes=1, gradient_itemsize=4)
    program = build_program(strategy, layout, activation_bytes=4)
    verify(program)
    return program


@dataclass(frozen=True)
class Sleeper:
    """A `sleeping_program`, and how long its computations take."""

    program: Program
    seconds: float
    """Of a forward through one stage, and of each half of a backward."""
    layers: int = 1
    elements: int = 1


def start_sleeping_workers(sleepers: Sequence[Sleeper], rank: int) -> list[Worker]:
    """This rank of each of the programs; all ranks call it together.

    They take turns on the same process groups: every group has threads of its own that look for messages now and then,
    and those of many idle ones would take turns with the one that is at work.
    """
    programs = [sleeper.program for sleeper in sleepers]
    collectives = Collectives(programs, rank, torch.float32, TIMEOUT)
    transport = Transport(programs, ShapeExchange.ONCE, CPU, collectives.traffic, TIMEOUT)
    return [_start(sleeper, rank, collectives, transport) for sleeper in sleepers]


def _start(sleeper: Sleeper, rank: int, collectives: Collectives, transport: Transport) -> Worker:
    program = sleeper.program
    stages = {
        index: SleepingStage(index, program.placement.stages, sleeper.seconds, sleeper.layers, sleeper.elements)
        for index in program.stages(rank)
    }
    worker = Worker(
        rank,
        stages,
        program,
        collectives,
        transport,
        gradient_dtype=torch.float32,
        all_settings=[OptimizerSettings("sgd")],
        max_gradient_norm=0.0,
        device=CPU,
    )
    for stage in stages.values():
        stage.takes = [partial(worker.gradients.of_weights.take, weight) for weight in stage.weights]
    return worker


def micro_batches(count: int) -> list[MicroBatch]:
    """Of one token each."""
    token = torch.zeros(1, 1, dtype=torch.int64)
    return [MicroBatch(token, token, token)] * count


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, seconds: float, take: Take) -> Tensor:
        ctx.seconds, ctx.take = seconds, take
        time.sleep(seconds)
        return input.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        time.sleep(ctx.seconds)
        ctx.take(partial(_sleep_and_add, ctx.seconds))
        return gradient, None, None, None


def _sleep_and_add(seconds: float, main: Tensor) -> None:
    time.sleep(seconds)
    main.add_(1)


class SleepingStage(Stage):
    """Hands on what it receives, layer by layer."""

    def __init__(self, index: int, stages: int, seconds: float, layers: int, elements: int) -> None:
        nn.Module.__init__(self)
        self.index = index
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.seconds = seconds
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(elements)) for _ in range(layers))
        self.takes: Sequence[Take] = ()

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        return {_name(self.index, layer): weight for layer, weight in enumerate(self.weights)}

    def forward(self, micro_batch: MicroBatch, hidden: Tensor | None = None) -> Tensor:
        output = torch.zeros(1) if hidden is None else hidden
        for weight, take in zip(self.weights, self.takes, strict=True):
            output = _Sleep.apply(output, weight, self.seconds / len(self.weights), take)
        return output.sum() if self.is_last else output


def _name(stage: int, layer: int) -> str:
    return f"stages.{stage}.{layer}"
