"""Performs a rank's forwards and backwards, and passes what they yield from stage to stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from syncline.data.batch import MicroBatch
from syncline.modeling.access.use import run_backward
from syncline.modeling.kernels.linear import DeferredGradients
from syncline.modeling.pipeline.stage import Stage
from syncline.program.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    OffloadActivations,
    PointToPoint,
    ReceiveActivation,
    ReceiveGradient,
    ScaleLoss,
    SendActivation,
    SendGradient,
    StartReceivingActivation,
    StartReceivingGradient,
)
from syncline.program.scales import Factor
from syncline.runtime.communication.point_to_point import Transport
from syncline.runtime.gradients import Gradients
from syncline.runtime.offload import Offload
from syncline.runtime.parameters import Parameters

Compute = Callable[[Stage, MicroBatch, "Tensor | None"], Tensor]
"""What a forward computes: (stage, micro-batch, hidden states received) -> hidden states, loss or logits."""

Place = tuple[int, int]
"""Stage, micro-batch."""


@dataclass
class PipelineState:
    """What is on its way through this rank's stages, from the first to the last action of one program."""

    micro_batches: Sequence[MicroBatch]
    compute: Compute
    transport: Transport
    inside: Mapping[Action, Sequence[Action]]
    """What happens during each computation, in program order."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    """Of each micro-batch, where the last stage is."""
    inputs: dict[Place, Tensor] = field(default_factory=dict)
    outputs: dict[Place, Tensor] = field(default_factory=dict)
    """Until they are sent; without backwards also what the last stage computes."""
    ways_back: dict[Place, GradientEdge | None] = field(default_factory=dict)
    """Where the backward of an output begins; None for one that needs none. It does not keep the output itself alive,
    of which no backward reads the values.
    """
    seeds: dict[int, float] = field(default_factory=dict)
    """The gradients of losses, where they are not 1."""
    output_gradients: dict[Place, Tensor] = field(default_factory=dict)
    input_gradients: dict[Place, Tensor] = field(default_factory=dict)
    deferred: dict[Place, DeferredGradients] = field(default_factory=dict)
    """What the first halves of backwards have left to the second ones."""


class Computations:
    """One rank's stages at work on a `PipelineState`."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        parameters: Parameters,
        gradients: Gradients,
        offload: Offload,
        value: Callable[[Factor, int], float],
        perform: Callable[[Action], None],
        idle: PipelineState,
    ) -> None:
        """`value` is what a factor amounts to for a micro-batch; `perform` performs an action inside a computation, by
        the handler that is here; `idle` stands where no program runs.
        """
        self._stages = stages
        self._parameters = parameters
        self._gradients = gradients
        self._offload = offload
        self._value = value
        self._perform = perform
        self.state = idle
        self.handlers: dict[type[Action], Callable[[Any], None]] = {
            Forward: self._forward,
            OffloadActivations: lambda action: offload.settle(),
            ScaleLoss: self._scale_loss,
            Backward: self._backward,
            BackwardInput: self._backward_input,
            BackwardWeight: self._backward_weight,
            SendActivation: self._send_activation,
            SendGradient: self._send_gradient,
            StartReceivingActivation: self._start_receiving,
            StartReceivingGradient: self._start_receiving,
            ReceiveActivation: self._receive_activation,
            ReceiveGradient: self._receive_gradient,
        }

    @contextmanager
    def on(self, state: PipelineState) -> Iterator[None]:
        """Meanwhile `state` is what is worked on."""
        suspended, self.state = self.state, state
        yield
        self.state = suspended
        left = [*state.inputs, *state.ways_back, *state.output_gradients, *state.input_gradients, *state.deferred]
        assert not left, f"still there at the end of the program, by stage and micro-batch: {left}"

    # ---- Forwards and backwards --------------------------------------------------------------------------------------

    def _forward(self, action: Forward) -> None:
        state, place, stage = self.state, _place(action), self._stages[action.stage]
        comes_back = torch.is_grad_enabled()
        # A backward will look for its input's gradient; without one to come nobody asks for the input again.
        received = state.inputs.get(place) if comes_back else state.inputs.pop(place, None)
        inside = state.inside.get(action, ())
        offloads = [each for each in inside if isinstance(each, OffloadActivations)]
        micro_batch = state.micro_batches[action.micro_batch]
        saving: AbstractContextManager[None] = nullcontext()
        if offloads:
            saving = self._offload.taking([*micro_batch.tensors, *([] if received is None else [received])])
        with self._parameters.used_by(inside), saving:
            output = state.compute(stage, micro_batch, received)
        for each in offloads:
            self._perform(each)
        if comes_back:
            state.ways_back[place] = get_gradient_edge(output) if output.requires_grad else None
        if stage.is_last and output.dim() == 0:
            state.losses[action.micro_batch] = output.detach()
        if action.stage + 1 in self._stages:  # This rank is its own neighbour.
            self._take_activation(action.stage + 1, action.micro_batch, output.detach())
        elif not (stage.is_last and comes_back):
            state.outputs[place] = output.detach()

    def _scale_loss(self, action: ScaleLoss) -> None:
        self.state.seeds[action.micro_batch] = self._value(action.scale, action.micro_batch)

    def _backward(self, action: Backward | BackwardInput) -> None:
        state, place = self.state, _place(action)
        way_back = state.ways_back.pop(place)
        if self._stages[action.stage].is_last:
            gradient = torch.full_like(state.losses[action.micro_batch], state.seeds.get(action.micro_batch, 1.0))
        else:
            gradient = state.output_gradients.pop(place)
        inside = state.inside.get(action, ())
        with self._gradients.added_by(inside), self._parameters.used_by(inside):
            if way_back is not None:  # It is where all that precedes the output is frozen.
                run_backward(way_back, gradient)
        received = state.inputs.pop(place, None)
        if received is None:
            return
        assert received.grad is not None, f"stage {action.stage} does not use what it receives"
        if action.stage - 1 in self._stages:
            state.output_gradients[action.stage - 1, action.micro_batch] = received.grad
        else:
            state.input_gradients[place] = received.grad

    def _backward_input(self, action: BackwardInput) -> None:
        with self._gradients.deferring(action.stage) as deferred:
            self._backward(action)
        self.state.deferred[_place(action)] = deferred

    def _backward_weight(self, action: BackwardWeight) -> None:
        self._gradients.add(self.state.deferred.pop(_place(action)), self.state.inside.get(action, ()))

    # ---- Messages ----------------------------------------------------------------------------------------------------

    def _send_activation(self, action: SendActivation) -> None:
        self._send(action, self.state.outputs.pop(_place(action)))

    def _send_gradient(self, action: SendGradient) -> None:
        self._send(action, self.state.input_gradients.pop(_place(action)))

    def _start_receiving(self, action: PointToPoint) -> None:
        self.state.transport.start_receiving(action, self._shape(action))

    def _receive_activation(self, action: ReceiveActivation) -> None:
        self._take_activation(action.stage, action.micro_batch, self._receive(action))

    def _receive_gradient(self, action: ReceiveGradient) -> None:
        self.state.output_gradients[_place(action)] = self._receive(action)

    def _take_activation(self, stage: int, micro_batch: int, hidden: Tensor) -> None:
        self.state.inputs[stage, micro_batch] = hidden.requires_grad_(torch.is_grad_enabled())

    def _send(self, action: PointToPoint, tensor: Tensor) -> None:
        self.state.transport.send(action, tensor, self._shape(action))

    def _receive(self, action: PointToPoint) -> Tensor:
        return self.state.transport.receive(action, self._shape(action))

    def _shape(self, action: PointToPoint) -> tuple[int, ...]:
        return tuple(self.state.micro_batches[action.micro_batch].input_ids.shape)


def _place(action: Forward | Backward | BackwardInput | BackwardWeight | PointToPoint) -> Place:
    return action.stage, action.micro_batch
