"""Runs one rank's actions. It knows what an action does, and nothing of why the program contains it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.data.batch import MicroBatch
from syncline.modeling.kernels.linear import accumulate_in_products
from syncline.modeling.pipeline.stage import Stage
from syncline.program.actions import (
    AccumulateShard,
    Action,
    Bubble,
    CheckFinite,
    ClipGradients,
    CountTokens,
    FreeGradients,
    OptimizerStep,
    ReduceLoss,
    ReduceReplicated,
    ScaleGradients,
    WaitGather,
    WaitReduce,
    ZeroGradients,
)
from syncline.program.program import Program
from syncline.program.scales import Factor
from syncline.runtime.communication.collectives import Collectives
from syncline.runtime.communication.point_to_point import Transport
from syncline.runtime.compute import Computations, Compute, PipelineState
from syncline.runtime.gradients import Gradients
from syncline.runtime.offload import Offload
from syncline.runtime.optimization.clip import clipping_factor, squared_norm
from syncline.runtime.optimization.loss_scale import LossScale
from syncline.runtime.optimization.optimizer import BucketOptimizer, OptimizerSettings
from syncline.runtime.parameters import Parameters
from syncline.runtime.readback import Readback
from syncline.runtime.timing import ActionTimer, Clock, Phase, clock_for, waiting

PHASES: dict[type[Action], Phase] = {
    WaitReduce: Phase.REDUCE_WAIT,
    WaitGather: Phase.REDUCE_WAIT,
    ReduceReplicated: Phase.REDUCE_WAIT,
    AccumulateShard: Phase.OPTIMIZER,
    ScaleGradients: Phase.OPTIMIZER,
    ClipGradients: Phase.OPTIMIZER,
    CheckFinite: Phase.OPTIMIZER,
    OptimizerStep: Phase.OPTIMIZER,
    ZeroGradients: Phase.OPTIMIZER,
    FreeGradients: Phase.OPTIMIZER,
}
"""Actions that are not forward and backward work."""

Observe = Callable[[Action], None]


def _nothing(action: Action) -> None:
    """For whom nobody has asked."""


@dataclass(frozen=True)
class StepResult:
    """One step's outcome on one rank. Scalars stay on the device until they are read."""

    loss: Tensor
    """The loss as reported, float64 scalar, equal on every rank."""
    gradient_norm: Tensor | None
    """Before clipping, float64 scalar, equal on every rank; None for a program without an update."""
    tokens: int
    """Valid tokens in the global batch."""
    bytes_sent: int
    bytes_sent_by_group: Mapping[str, int]
    reductions: int
    """Collectives on gradient buckets that this rank took part in."""
    peak_gradient_bytes: int
    held_gradient_bytes: int
    """What is still allocated after the step."""
    peak_gathered_bytes: int
    """Of parameters that are gathered and freed again."""
    peak_offloaded_bytes: int
    """Of activations that wait in host memory."""
    numbers: Readback
    """Loss and, with an update, gradient norm, on their way to the host."""
    clock: Clock
    """Seconds of each phase, for who reads them."""
    checks_overflow: bool = False
    loss_scale: float = 1.0
    """By which losses were scaled up in this step."""
    timer: ActionTimer | None = None
    """When each action ran, if timers are on; for who has read `numbers`."""

    @property
    def overflowed(self) -> bool:
        """A gradient was not finite, so nothing was updated. Looked for in float16 only; waits for `numbers`."""
        return self.checks_overflow and not math.isfinite(self.numbers.values()[1])

    @property
    def skipped(self) -> bool:
        """Nothing was updated: no valid token was there, or a gradient has overflowed."""
        return self.tokens == 0 or self.overflowed


@dataclass
class _StepState:
    """What is decided from the first to the last action of one program."""

    learning_rate: float = 0.0
    tokens: int = 0
    tokens_known: bool = False
    gradient_norm: Tensor | None = None
    clip_factor: Tensor | None = None
    overflow: Tensor | None = None
    loss: Tensor | None = None


class Worker:
    """One rank's stages, buckets and optimizers, and the code behind every action."""

    def __init__(
        self,
        rank: int,
        stages: Mapping[int, Stage],
        program: Program,
        collectives: Collectives,
        transport: Transport,
        *,
        gradient_dtype: torch.dtype,
        all_settings: Sequence[OptimizerSettings],
        max_gradient_norm: float,
        device: torch.device,
        loss_scale: float = 1.0,
        timers: bool = False,
        evaluation_transport: Transport | None = None,
    ) -> None:
        """`evaluation_transport` carries the messages of programs that run beside the step, by default as the step's
        own are: then none of the step's may be under way when another program begins.
        """
        self.rank = rank
        self.stages = stages
        self.program = program
        self._device = device
        self._collectives = collectives
        self._transport = transport
        self._evaluation_transport = evaluation_transport or transport
        self._max_gradient_norm = max_gradient_norm
        self._timers = timers
        self._state = _StepState()
        self._clock: Clock | None = None
        self._timer: ActionTimer | None = None
        self.parameters = Parameters(rank, program, stages, collectives, self._waiting, self._perform)
        self.gradients = Gradients(
            rank,
            program,
            self.parameters.buckets,
            gradient_dtype,
            collectives,
            self._value,
            self._waiting,
            self._perform,
        )
        idle = PipelineState((), Stage.__call__, transport, {})
        kept = (tensor for stage in stages.values() for tensor in (*stage.parameters(), *stage.buffers()))
        self.offload = Offload(device, kept)
        self.computations = Computations(
            stages, self.parameters, self.gradients, self.offload, self._value, self._perform, idle
        )
        self.optimizers = {
            bucket.id: BucketOptimizer(
                bucket, self.parameters.buckets[bucket.id].owned, all_settings, program.owned(rank, bucket.id)
            )
            for bucket in program.buckets(rank)
            if program.owns(rank, bucket.id)
        }
        self.loss_scale = LossScale(loss_scale)
        self._checks_overflow = any(isinstance(action, CheckFinite) for action in program.ranks[rank])
        self._undecided: StepResult | None = None
        self._inside = _actions_inside(program.ranks[rank])
        for stage in stages.values():
            accumulate_in_products(
                stage, self.gradients.of_weights, gradient_dtype, every_dtype=program.halves_backwards
            )
        self._handlers: dict[type[Action], Callable[..., None]] = {
            CountTokens: self._count_tokens,
            Bubble: lambda action: None,
            ClipGradients: self._clip_gradients,
            CheckFinite: self._check_finite,
            OptimizerStep: self._optimizer_step,
            ReduceLoss: self._reduce_loss,
            **self.computations.handlers,
            **self.gradients.handlers,
            **self.parameters.handlers,
        }

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        learning_rate: float,
        after: Observe = _nothing,
        before: Observe = _nothing,
    ) -> StepResult:
        """One optimizer step of this rank: `micro_batches` of the program's number, on this rank's device.

        `before` and `after` are called with every action, before and after it is performed where it stands in the
        program. A `Bubble` is nothing but the time between the two calls.
        """
        assert len(micro_batches) == self.program.micro_batches
        self._settle_loss_scale()
        self._collectives.traffic.restart()
        self.gradients.memory.restart_peak()
        self.parameters.memory.restart_peak()
        self.offload.memory.restart_peak()
        pipeline_state = PipelineState(micro_batches, Stage.__call__, self._transport, self._inside)
        actions = self.program.ranks[self.rank]
        self._timer = ActionTimer(actions, self._device, self._timer) if self._timers else None
        result = self._run(actions, pipeline_state, _StepState(learning_rate), after, before)
        self._undecided = result if self._checks_overflow else None
        return result

    @torch.no_grad()
    def evaluate(self, program: Program, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """Run a program without backwards; the loss is the sum of token losses.

        May be called by `before` or `after` in the midst of a step, on all ranks at the same action.
        """
        return self._run_outside_step(program, self._state_outside_step(program, micro_batches, Stage.__call__))

    @torch.no_grad()
    def predict(self, program: Program, micro_batch: MicroBatch) -> Tensor | None:
        """The logits (batch, sequence, vocabulary) of one micro-batch where its last stage is, None elsewhere."""
        pipeline_state = self._state_outside_step(program, (micro_batch,), _hidden_or_logits)
        self._run_outside_step(program, pipeline_state)
        return next(iter(pipeline_state.outputs.values()), None)

    def _state_outside_step(
        self, program: Program, micro_batches: Sequence[MicroBatch], compute: Compute
    ) -> PipelineState:
        return PipelineState(
            micro_batches, compute, self._evaluation_transport, _actions_inside(program.ranks[self.rank])
        )

    def _run_outside_step(self, program: Program, pipeline_state: PipelineState) -> StepResult:
        """Run another program on the same stages, and leave everything as it was."""
        suspended, clock, timer = self._state, self._clock, self._timer
        with self._collectives.traffic.counted_apart(), self.parameters.at_rest():
            self._timer = None
            result = self._run(program.ranks[self.rank], pipeline_state, _StepState())
        self._state, self._clock, self._timer = suspended, clock, timer
        return result

    def _settle_loss_scale(self) -> None:
        """The previous step's decision changes the scale of this one."""
        undecided, self._undecided = self._undecided, None
        if undecided is not None and undecided.tokens > 0:
            self.loss_scale.update(finite=not undecided.overflowed)

    # ---- Running ---------------------------------------------------------------------------------------------------

    def _run(
        self,
        actions: Sequence[Action],
        pipeline_state: PipelineState,
        state: _StepState,
        after: Observe = _nothing,
        before: Observe = _nothing,
    ) -> StepResult:
        self._state = state
        clock = self._clock = clock_for(self._device)
        with self.computations.on(pipeline_state):
            for action in actions:
                clock.enter(PHASES.get(type(action), Phase.FORWARD_BACKWARD))
                before(action)
                if getattr(action, "during", None) is None:
                    self._perform(action)
                after(action)
            pipeline_state.transport.end_step()
            self.offload.settle(everything=True)
        clock.enter(None)
        assert state.loss is not None
        scalars = [state.loss] if state.gradient_norm is None else [state.loss, state.gradient_norm]
        return StepResult(
            loss=state.loss,
            gradient_norm=state.gradient_norm,
            tokens=state.tokens,
            bytes_sent=self._collectives.traffic.sent,
            bytes_sent_by_group=dict(self._collectives.traffic.by_group),
            reductions=self._collectives.traffic.reductions,
            peak_gradient_bytes=self.gradients.memory.peak,
            held_gradient_bytes=self.gradients.memory.held,
            peak_gathered_bytes=self.parameters.memory.peak,
            peak_offloaded_bytes=self.offload.memory.peak,
            numbers=Readback(*scalars),
            clock=clock,
            checks_overflow=state.overflow is not None,
            loss_scale=self.loss_scale.value,
            timer=self._timer,
        )

    def _perform(self, action: Action) -> None:
        """Every action comes by here, those inside computations too."""
        with self._timer.measuring(action) if self._timer is not None else nullcontext():
            self._handlers[type(action)](action)

    def _waiting(self) -> AbstractContextManager[None]:
        return waiting(self._clock)

    def _quantities(self, micro_batch: int | None = None) -> dict[str, float]:
        assert self._state.tokens_known, "a scale is needed before the tokens have been counted"
        own = self.computations.state.micro_batches[micro_batch].valid_tokens if micro_batch is not None else 0
        return {
            "loss_scale": self.loss_scale.value,
            "tokens": self._state.tokens,
            "micro_batch_tokens": own,
            "accumulation": self.program.micro_batches,
            "replicas": self.program.topology.replicas,
        }

    def _value(self, scale: Factor, micro_batch: int | None = None) -> float:
        return scale.evaluate(self._quantities(micro_batch), 1.0)

    # ---- Decisions and updates ---------------------------------------------------------------------------------------

    def _count_tokens(self, action: CountTokens) -> None:
        # On the host, from what the loader has counted: no device waits for it.
        count = torch.tensor(sum(micro_batch.valid_tokens for micro_batch in self.computations.state.micro_batches))
        self._collectives.sum(count, action.group, "the number of valid tokens on every replica")
        self._state.tokens = int(count)
        self._state.tokens_known = True

    def _clip_gradients(self, action: ClipGradients) -> None:
        square = squared_norm((self.gradients.buckets[id].consumed for id in action.buckets), self._device)
        self._collectives.sum(square, action.group, "the gradient norm of every part")
        norm = square.sqrt() * self._value(action.scale)
        self._state.gradient_norm = norm
        if self._max_gradient_norm > 0:
            self._state.clip_factor = clipping_factor(norm, self._max_gradient_norm)

    def _check_finite(self, action: CheckFinite) -> None:
        norm = self._state.gradient_norm
        assert norm is not None
        # The norm is the same on every rank, bit by bit, and so is the decision.
        self._state.overflow = norm.isfinite().logical_not().float()

    def _optimizer_step(self, action: OptimizerStep) -> None:
        if self._state.tokens == 0:
            return
        factor = self._state.clip_factor
        if action.scale:
            scale = torch.full((), self._value(action.scale), dtype=torch.float64, device=self._device)
            factor = scale if factor is None else factor * scale
        gradient = self.gradients.buckets[action.bucket].consumed
        self.optimizers[action.bucket].step(gradient, self._state.learning_rate, factor, self._state.overflow)

    def _reduce_loss(self, action: ReduceLoss) -> None:
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        for micro_batch, value in self.computations.state.losses.items():
            loss += value.double() * self._value(action.scale, micro_batch)
        self._collectives.sum(loss, action.group, "the loss of every rank")
        self._state.loss = loss


def _hidden_or_logits(stage: Stage, micro_batch: MicroBatch, hidden: Tensor | None) -> Tensor:
    return stage.logits(micro_batch, hidden) if stage.is_last else stage(micro_batch, hidden)


def _actions_inside(actions: Sequence[Action]) -> dict[Action, tuple[Action, ...]]:
    """What happens during each computation, in program order."""
    inside: dict[Action, list[Action]] = {}
    for action in actions:
        during = getattr(action, "during", None)
        if during is not None:
            inside.setdefault(during, []).append(action)
    return {computation: tuple(happening) for computation, happening in inside.items()}
