"""Runs one rank's actions. It knows what an action does, and nothing of why the program contains it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from syncline.modeling.batch import MicroBatch
from syncline.modeling.stage import Stage
from syncline.program.actions import (
    Action,
    AllocateGradients,
    Backward,
    ClipGradients,
    CountTokens,
    Forward,
    FreeGradients,
    OptimizerStep,
    ReceiveActivation,
    ReceiveGradient,
    ReduceGradients,
    ReduceLoss,
    ReduceReplicated,
    ScaleGradients,
    ScaleLoss,
    SendActivation,
    SendGradient,
    WaitReduce,
    ZeroGradients,
)
from syncline.program.factors import Factor
from syncline.program.program import Program
from syncline.runtime.buckets import GradientBucket, GradientMemory, ParameterBucket, Storage
from syncline.runtime.clip import clipping_factor, squared_norm
from syncline.runtime.clock import ActionTime, Clock, Phase, clock_for
from syncline.runtime.collectives import Collectives, Pending
from syncline.runtime.optimizer import BucketOptimizer, OptimizerSettings
from syncline.runtime.products import accumulate_in_products
from syncline.runtime.readback import Readback
from syncline.runtime.transport import Transport
from syncline.runtime.triggers import BackwardTriggers

PHASES: dict[type[Action], Phase] = {
    WaitReduce: Phase.REDUCE_WAIT,
    ReduceReplicated: Phase.REDUCE_WAIT,
    ScaleGradients: Phase.OPTIMIZER,
    ClipGradients: Phase.OPTIMIZER,
    OptimizerStep: Phase.OPTIMIZER,
    ZeroGradients: Phase.OPTIMIZER,
    FreeGradients: Phase.OPTIMIZER,
}
"""Actions that are not forward and backward work."""


Compute = Callable[[Stage, MicroBatch, "Tensor | None"], Tensor]
"""What a forward computes: (stage, micro-batch, hidden states received) -> hidden states, loss or logits."""

Observe = Callable[[Action], None]

DuringBackward = AllocateGradients | ReduceGradients


@dataclass(frozen=True)
class StepResult:
    """One step's outcome on one rank. Scalars stay on the device until they are read."""

    loss: Tensor
    """The loss as reported, float64 scalar, equal on every rank."""
    gradient_norm: Tensor | None
    """Before clipping, float64 scalar, equal on every rank; None for a program without an update."""
    tokens: int
    """Valid tokens in the global batch."""
    skipped: bool
    """No valid token was there, so nothing was updated."""
    bytes_sent: int
    peak_gradient_bytes: int
    held_gradient_bytes: int
    """What is still allocated after the step."""
    numbers: Readback
    """Loss and, with an update, gradient norm, on their way to the host."""
    clock: Clock
    """Seconds of each phase, for who reads them."""
    actions: tuple[ActionTime, ...] = ()
    """When each action ran, if timers are on."""


@dataclass
class _StepState:
    """What lives from the first to the last action of one step."""

    micro_batches: Sequence[MicroBatch]
    learning_rate: float
    compute: Compute
    tokens: int = 0
    tokens_known: bool = False
    inputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    output_gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    input_gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    seeds: dict[int, float] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    reductions: dict[int, Pending] = field(default_factory=dict)
    gradient_norm: Tensor | None = None
    clip_factor: Tensor | None = None
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
        optimizer: OptimizerSettings,
        max_gradient_norm: float,
        device: torch.device,
        timers: bool = False,
    ) -> None:
        self.rank = rank
        self.stages = stages
        self.program = program
        self.memory = GradientMemory()
        self._device = device
        self._collectives = collectives
        self._transport = transport
        self._max_gradient_norm = max_gradient_norm
        self._timers = timers
        parameters = {name: p for stage in stages.values() for name, p in stage.parameters_by_name().items()}
        self.parameters = {b.id: ParameterBucket(b, parameters) for b in program.buckets(rank)}
        self.gradients = {
            b.id: GradientBucket(b, self.parameters[b.id].parameters, gradient_dtype, self.memory)
            for b in program.buckets(rank)
        }
        self.optimizers = {
            b.id: BucketOptimizer(self.parameters[b.id], optimizer, b.decay) for b in program.buckets(rank)
        }
        self._during = _actions_by_backward(program.ranks[rank])
        self._triggers = BackwardTriggers(self._perform)
        self._prepare_gradients(program.ranks[rank])
        self._bucket_of: dict[Tensor, int] = {
            p: id for id, bucket in self.parameters.items() for p in bucket.parameters
        }
        for stage in stages.values():
            accumulate_in_products(stage, self._main_gradient, gradient_dtype)
        self._handlers: dict[type[Action], Callable[..., None]] = {
            CountTokens: self._count_tokens,
            Forward: self._forward,
            ScaleLoss: self._scale_loss,
            Backward: self._backward,
            SendActivation: self._send_activation,
            ReceiveActivation: self._receive_activation,
            SendGradient: self._send_gradient,
            ReceiveGradient: self._receive_gradient,
            AllocateGradients: lambda action: self.gradients[action.bucket].allocate(),
            ReduceGradients: self._reduce_gradients,
            WaitReduce: self._wait_reduce,
            ScaleGradients: self._scale_gradients,
            ReduceReplicated: self._reduce_replicated,
            ClipGradients: self._clip_gradients,
            OptimizerStep: self._optimizer_step,
            ZeroGradients: lambda action: self.gradients[action.bucket].zero(),
            FreeGradients: lambda action: self.gradients[action.bucket].free(),
            ReduceLoss: self._reduce_loss,
        }

    def step(
        self, micro_batches: Sequence[MicroBatch], learning_rate: float, observe: Observe | None = None
    ) -> StepResult:
        """One optimizer step of this rank: `micro_batches` of the program's number, on this rank's device.

        `observe` is called with every action that has been performed where it stands in the program.
        """
        assert len(micro_batches) == self.program.micro_batches
        actions = self.program.ranks[self.rank]
        state = _StepState(micro_batches, learning_rate, Stage.__call__)
        return self._run(actions, state, observe)

    @torch.no_grad()
    def evaluate(self, program: Program, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """Run a program without backwards; the loss is the sum of token losses."""
        return self._run(program.ranks[self.rank], _StepState(micro_batches, 0.0, Stage.__call__))

    @torch.no_grad()
    def predict(self, program: Program, micro_batch: MicroBatch) -> Tensor | None:
        """The logits (batch, sequence, vocabulary) of one micro-batch where its last stage is, None elsewhere."""
        state = _StepState((micro_batch,), 0.0, _hidden_or_logits)
        self._run(program.ranks[self.rank], state)
        return next(iter(state.outputs.values()), None)

    # ---- Running ---------------------------------------------------------------------------------------------------

    def _run(self, actions: Sequence[Action], state: _StepState, observe: Observe | None = None) -> StepResult:
        self._state = state
        self._collectives.traffic.restart()
        self.memory.restart_peak()
        clock = clock_for(self._device)
        times: list[ActionTime] = []
        began = time.perf_counter()
        for position, action in enumerate(actions):
            clock.enter(PHASES.get(type(action), Phase.FORWARD_BACKWARD))
            start = time.perf_counter() - began if self._timers else 0.0
            if getattr(action, "during", None) is None:
                self._perform(action)
            if self._timers:
                times.append(ActionTime(position, start, time.perf_counter() - began))
            if observe is not None:
                observe(action)
        self._transport.end_step()
        clock.enter(None)
        assert state.loss is not None
        scalars = [state.loss] if state.gradient_norm is None else [state.loss, state.gradient_norm]
        return StepResult(
            loss=state.loss,
            gradient_norm=state.gradient_norm,
            tokens=state.tokens,
            skipped=state.tokens == 0,
            bytes_sent=self._collectives.traffic.sent,
            peak_gradient_bytes=self.memory.peak,
            held_gradient_bytes=self.memory.held,
            numbers=Readback(*scalars),
            clock=clock,
            actions=tuple(times),
        )

    def _perform(self, action: Action) -> None:
        self._handlers[type(action)](action)

    def _prepare_gradients(self, actions: Sequence[Action]) -> None:
        """Buckets that no action allocates live for the whole run; those with a `during` are watched."""
        allocated = self.program.released_buckets(self.rank)
        watched = {happening.bucket for inside in self._during.values() for happening in inside}
        for id, bucket in self.gradients.items():
            if id not in allocated:
                bucket.allocate()
            if id in watched:
                self._triggers.watch(bucket)

    def _main_gradient(self, parameter: Tensor) -> Tensor:
        self._triggers.allocate_now(self._bucket_of[parameter])
        assert parameter.grad is not None
        return parameter.grad

    def _quantities(self, micro_batch: int | None = None) -> dict[str, float]:
        assert self._state.tokens_known, "a scale is needed before the tokens have been counted"
        own = self._state.micro_batches[micro_batch].valid_tokens if micro_batch is not None else 0
        return {
            "tokens": self._state.tokens,
            "micro_batch_tokens": own,
            "accumulation": self.program.micro_batches,
            "replicas": self.program.topology.replicas,
        }

    def _value(self, scale: Factor, micro_batch: int | None = None) -> float:
        return scale.evaluate(self._quantities(micro_batch), 1.0)

    # ---- Compute -----------------------------------------------------------------------------------------------------

    def _count_tokens(self, action: CountTokens) -> None:
        # On the host, from what the loader has counted: no device waits for it.
        count = torch.tensor(sum(micro_batch.valid_tokens for micro_batch in self._state.micro_batches))
        self._collectives.sum(count, action.group, "the number of valid tokens on every replica")
        self._state.tokens = int(count)
        self._state.tokens_known = True

    def _forward(self, action: Forward) -> None:
        key = (action.stage, action.micro_batch)
        stage = self.stages[action.stage]
        output = self._state.compute(stage, self._state.micro_batches[action.micro_batch], self._state.inputs.get(key))
        if stage.is_last and output.dim() == 0:
            self._state.losses[action.micro_batch] = output.detach()
        self._state.outputs[key] = output

    def _scale_loss(self, action: ScaleLoss) -> None:
        self._state.seeds[action.micro_batch] = self._value(action.scale, action.micro_batch)

    def _backward(self, action: Backward) -> None:
        key = (action.stage, action.micro_batch)
        output = self._state.outputs.pop(key)
        if self.stages[action.stage].is_last:
            gradient = torch.full_like(output, self._state.seeds.get(action.micro_batch, 1.0))
        else:
            gradient = self._state.output_gradients.pop(key)
        self._triggers.arm(self._during.get(action, ()), self.gradients)
        if output.requires_grad:  # Not when all that precedes it is frozen.
            torch.autograd.backward(output, gradient)
        self._triggers.finish()
        received = self._state.inputs.pop(key, None)
        if received is not None:
            assert received.grad is not None, f"stage {action.stage} does not use what it receives"
            self._state.input_gradients[key] = received.grad

    # ---- Messages ----------------------------------------------------------------------------------------------------

    def _shape(self, micro_batch: int) -> tuple[int, ...]:
        return tuple(self._state.micro_batches[micro_batch].input_ids.shape)

    def _send_activation(self, action: SendActivation) -> None:
        key = (action.stage, action.micro_batch)
        # Without a backward to come, nobody will ask for the output again.
        output = self._state.outputs[key] if torch.is_grad_enabled() else self._state.outputs.pop(key)
        self._transport.send(action, output.detach(), self._shape(action.micro_batch))

    def _receive_activation(self, action: ReceiveActivation) -> None:
        hidden = self._transport.receive(action, self._shape(action.micro_batch))
        self._state.inputs[action.stage, action.micro_batch] = hidden.requires_grad_(torch.is_grad_enabled())

    def _send_gradient(self, action: SendGradient) -> None:
        gradient = self._state.input_gradients.pop((action.stage, action.micro_batch))
        self._transport.send(action, gradient, self._shape(action.micro_batch))

    def _receive_gradient(self, action: ReceiveGradient) -> None:
        gradient = self._transport.receive(action, self._shape(action.micro_batch))
        self._state.output_gradients[action.stage, action.micro_batch] = gradient

    # ---- The life of a gradient --------------------------------------------------------------------------------------

    def _reduce_gradients(self, action: ReduceGradients) -> None:
        bucket = self.gradients[action.bucket]
        assert bucket.state is Storage.LIVE
        bucket.state = Storage.REDUCING
        what = f"the reduction of bucket {action.bucket} over {action.group}"
        self._state.reductions[action.bucket] = self._collectives.reduce(
            bucket.flat, action.group, action.op, action.kind, what
        )

    def _wait_reduce(self, action: WaitReduce) -> None:
        self._state.reductions.pop(action.bucket).wait()
        self.gradients[action.bucket].state = Storage.LIVE

    def _scale_gradients(self, action: ScaleGradients) -> None:
        self.gradients[action.bucket].flat.mul_(self._value(action.scale))

    def _reduce_replicated(self, action: ReduceReplicated) -> None:
        self._collectives.sum(self.gradients[action.bucket].flat, action.group, f"the other copies of {action.what}")

    def _clip_gradients(self, action: ClipGradients) -> None:
        square = squared_norm((self.gradients[id].flat for id in action.buckets), self._device)
        self._collectives.sum(square, action.group, "the gradient norm of every stage")
        norm = square.sqrt() * self._value(action.scale)
        self._state.gradient_norm = norm
        if self._max_gradient_norm > 0:
            self._state.clip_factor = clipping_factor(norm, self._max_gradient_norm)

    def _optimizer_step(self, action: OptimizerStep) -> None:
        if self._state.tokens == 0:
            return
        factor = self._state.clip_factor
        if action.scale:
            scale = torch.full((), self._value(action.scale), dtype=torch.float64, device=self._device)
            factor = scale if factor is None else factor * scale
        self.optimizers[action.bucket].step(self.gradients[action.bucket], self._state.learning_rate, factor)

    def _reduce_loss(self, action: ReduceLoss) -> None:
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        for micro_batch, value in self._state.losses.items():
            loss += value.double() * self._value(action.scale, micro_batch)
        self._collectives.sum(loss, action.group, "the loss of every rank")
        self._state.loss = loss


def _hidden_or_logits(stage: Stage, micro_batch: MicroBatch, hidden: Tensor | None) -> Tensor:
    return stage.logits(micro_batch, hidden) if stage.is_last else stage(micro_batch, hidden)


def _actions_by_backward(actions: Sequence[Action]) -> dict[Backward, tuple[DuringBackward, ...]]:
    """What happens during each backward, in program order."""
    inside: dict[Backward, list[DuringBackward]] = {}
    for action in actions:
        if isinstance(action, (AllocateGradients, ReduceGradients)) and action.during is not None:
            inside.setdefault(action.during, []).append(action)
    return {backward: tuple(happening) for backward, happening in inside.items()}
