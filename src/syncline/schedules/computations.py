"""The computations that a schedule puts in order: the first actions of a step's program."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Action:
    """What one rank does next."""


@dataclass(frozen=True)
class Forward(Action):
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Backward(Action):
    """Gradients of the stage's input and of its weights; the latter are added to the stage's buckets."""

    stage: int
    micro_batch: int


@dataclass(frozen=True)
class BackwardInput(Action):
    """The first half of a backward: the gradient of the stage's input.

    What the other half needs is kept until then: of a plain linear layer or embedding its input and the gradient of its
    output, of every other weight the gradient itself.
    """

    stage: int
    micro_batch: int


@dataclass(frozen=True)
class BackwardWeight(Action):
    """The second half: the gradients of the stage's weights are added to its buckets. No other rank waits for it."""

    stage: int
    micro_batch: int


Computation = Forward | Backward | BackwardInput | BackwardWeight
"""What an action with a `during` may happen inside."""
COMPUTATIONS = (Forward, Backward, BackwardInput, BackwardWeight)
USING_PARAMETERS = (Forward, Backward, BackwardInput)
"""The second half of a backward reads activations and gradients only."""
ADDING_GRADIENTS = (Backward, BackwardWeight)
"""These add the gradients of their stage and micro-batch to the buckets."""
