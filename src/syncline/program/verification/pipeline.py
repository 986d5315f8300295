"""Forwards, backwards, and the messages between stages."""

from __future__ import annotations

from fractions import Fraction

from syncline.program.actions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Bubble,
    Forward,
    OffloadActivations,
    PointToPoint,
    ReceiveActivation,
    ScaleLoss,
    SendActivation,
)
from syncline.program.verification.gradients import GradientRules
from syncline.program.verification.parameters import ParameterRules
from syncline.program.verification.state import RankState, Violation
from syncline.program.verification.world import Rules, World


class PipelineRules:
    """Computations use parameters and write gradients; messages carry their inputs and seeds."""

    def __init__(self, world: World, gradients: GradientRules, parameters: ParameterRules) -> None:
        self._world = world
        self._program = world.program
        self._gradients = gradients
        self._parameters = parameters
        self._sent: dict[tuple[int, int, str], list[PointToPoint]] = {}
        """By sender, receiver and direction what has not been received."""

    @property
    def rules(self) -> Rules:
        return Rules(
            perform={
                Forward: self._forward,
                ScaleLoss: self._scale_loss,
                Bubble: lambda rank, action: None,
                OffloadActivations: self._offload,
                Backward: self._backward,
                BackwardInput: self._backward,
                BackwardWeight: self._backward_weight,
            }
        )

    def require_at_end(self, rank: RankState) -> None:
        for (source, destination, direction), waiting in self._sent.items():
            if waiting and destination == rank.number:
                what = f"{direction} of micro-batch {waiting[0].micro_batch} from rank {source} is never received"
                raise Violation(1, rank.number, None, what)
        for stage, micro_batch in sorted(rank.forwards - rank.backwards):
            if self._world.updates:
                what = f"the activations of stage {stage}, micro-batch {micro_batch} are never used"
                raise Violation(3, rank.number, None, what)
        for started in (each for each in rank.receiving.values() if each):
            raise Violation(1, rank.number, started[0], "it is never waited for")
        for stage, micro_batch in sorted(rank.awaited_halves):
            what = f"the weight gradients of stage {stage}, micro-batch {micro_batch} are never computed"
            raise Violation(2, rank.number, None, what)

    def _forward(self, rank: RankState, action: Forward) -> None:
        key = (action.stage, action.micro_batch)
        before = (action.stage - 1, action.micro_batch)
        if action.stage > 0 and key not in rank.activations and before not in rank.forwards:
            raise Violation(3, rank.number, action, "its activation has not been received")
        self._parameters.use(rank, action)
        rank.forwards.add(key)

    def _offload(self, rank: RankState, action: OffloadActivations) -> None:
        key = (action.stage, action.micro_batch)
        if action.during != Forward(*key):
            raise Violation(3, rank.number, action, "what it moves is not saved where it stands")
        if key in rank.offloaded:
            raise Violation(3, rank.number, action, "the same activations are moved twice")
        rank.offloaded.add(key)

    def _scale_loss(self, rank: RankState, action: ScaleLoss) -> None:
        if (action.stage, action.micro_batch) in rank.backwards:
            raise Violation(5, rank.number, action, "the backward has already been seeded")
        seed = rank.seeds.get(action.micro_batch, Fraction(1))
        rank.seeds[action.micro_batch] = seed * self._world.value(action.scale)

    def _backward(self, rank: RankState, action: Backward | BackwardInput) -> None:
        """A whole backward, or its first half."""
        key = (action.stage, action.micro_batch)
        if key not in rank.forwards:
            raise Violation(3, rank.number, action, "it comes before its forward")
        seed = self._seed(rank, key)
        if seed is None:
            raise Violation(3, rank.number, action, "the gradient of its output has not been received")
        if key in rank.backwards:
            raise Violation(2, rank.number, action, "the same gradient is added twice")
        self._parameters.use(rank, action)
        rank.backwards.add(key)
        if self._program.holder(rank.number, action.stage - 1) == rank.number and action.stage > 0:
            rank.gradients[action.stage - 1, action.micro_batch] = seed
        if isinstance(action, BackwardInput):
            rank.awaited_halves[key] = seed
        else:
            self._gradients.write(rank, action, seed)

    def _seed(self, rank: RankState, key: tuple[int, int]) -> Fraction | None:
        """What the gradient of a stage's output has been multiplied by; None as long as it is not there."""
        stage, micro_batch = key
        if stage == self._program.last_stage:
            return rank.seeds.get(micro_batch, Fraction(1))
        return rank.gradients.get(key)

    def _backward_weight(self, rank: RankState, action: BackwardWeight) -> None:
        seed = rank.awaited_halves.pop((action.stage, action.micro_batch), None)
        if seed is None:
            done = (action.stage, action.micro_batch) in rank.backwards
            what = "the same gradient is added twice" if done else "it comes before the first half of its backward"
            raise Violation(2 if done else 3, rank.number, action, what)
        self._gradients.write(rank, action, seed)

    def send(self, rank: RankState, action: PointToPoint) -> Fraction:
        """What the message carries: the seed of the gradient, 1 for activations."""
        done = rank.forwards if isinstance(action, SendActivation) else rank.backwards
        if (action.stage, action.micro_batch) not in done:
            raise Violation(3, rank.number, action, "what it sends has not been computed")
        self._sent.setdefault((rank.number, action.peer, action.direction), []).append(action)
        if isinstance(action, SendActivation):
            return Fraction(1)
        seed = self._seed(rank, (action.stage, action.micro_batch))
        assert seed is not None
        return seed

    def start_receiving(self, rank: RankState, action: PointToPoint) -> None:
        rank.receiving.setdefault((action.peer, action.direction), []).append(action)

    def receive(self, rank: RankState, action: PointToPoint, sent: PointToPoint, seed: Fraction) -> None:
        if started := rank.receiving.get((action.peer, action.direction)):
            first = started.pop(0)
            if (first.stage, first.micro_batch) != (action.stage, action.micro_batch):
                raise Violation(1, rank.number, action, f"what it has started to receive next is {first}")
        self._sent[action.peer, rank.number, action.direction].pop(0)
        step = 1 if action.direction == "activation" else -1
        key = (action.stage, action.micro_batch)
        if (sent.stage + step, sent.micro_batch) != key:
            raise Violation(1, rank.number, action, f"what rank {action.peer} sends next is {sent}")
        if isinstance(action, ReceiveActivation):
            rank.activations.add(key)
        else:
            rank.gradients[key] = seed
