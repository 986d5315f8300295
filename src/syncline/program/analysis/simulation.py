"""When a pipeline's computations run, where each takes a given time and messages take none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from syncline.program.actions import (
    ADDING_GRADIENTS,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Computation,
    Forward,
    OffloadActivations,
)
from syncline.schedules.placement import Placement


@dataclass(frozen=True)
class Costs:
    """How long computations take, in any one unit: by default in forwards through one stage, and each half of a
    backward has a matrix product for each of the forward's.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    stages: tuple[float, ...] = ()
    """How many times as long each stage takes; empty where all are alike."""

    def of(self, computation: Computation) -> float:
        if isinstance(computation, Forward):
            time = self.forward
        elif isinstance(computation, Backward):
            time = self.backward_input + self.backward_weight
        elif isinstance(computation, BackwardWeight):
            time = self.backward_weight
        else:
            time = self.backward_input
        return time * self.stages[computation.stage] if self.stages else time


@dataclass(frozen=True)
class Moment:
    """When one rank computes what."""

    computation: Computation
    begin: float
    end: float
    waited: float
    """How long the rank had nothing to do before."""


EQUAL = Costs()


def simulate(
    placement: Placement, orders: Sequence[Sequence[Computation]], costs: Costs = EQUAL
) -> tuple[tuple[Moment, ...], ...]:
    """For each position in the pipeline when its computations run, in its own order: a rank waits for what another one
    has to send, and for nothing else.

    Of an order in which something would wait for ever, what comes before that is there.
    """
    ends: dict[tuple[bool, int, int], float] = {}
    moments: tuple[list[Moment], ...] = tuple([] for _ in orders)
    moved = True
    while moved:
        moved = False
        for order, own in zip(orders, moments, strict=True):
            now = own[-1].end if own else 0.0
            for index in range(len(own), len(order)):
                computation = order[index]
                arrival = _arrival(placement, computation, ends)
                if arrival is None:
                    break
                waited = max(0.0, arrival - now)
                begin, now = now + waited, now + waited + costs.of(computation)
                own.append(Moment(computation, begin, now, waited))
                if not isinstance(computation, BackwardWeight):
                    ends[isinstance(computation, Forward), computation.stage, computation.micro_batch] = now
                moved = True
    return tuple(map(tuple, moments))


def length(moments: Sequence[Sequence[Moment]]) -> float:
    """When the last computation ends."""
    return max((own[-1].end for own in moments if own), default=0.0)


def most_activations(order: Iterable[Action]) -> int:
    """The most micro-batches whose activations a rank holds at any moment, each at one of its stages: from a forward
    to its backward, to the second half of it where there are two; less the time in which they wait in host memory.
    """
    most = held = 0
    away: set[tuple[int, int]] = set()
    for action in order:
        if isinstance(action, OffloadActivations):
            held -= 1
            away.add((action.stage, action.micro_batch))
        elif isinstance(action, Forward):
            held += 1
        elif isinstance(action, (Backward, BackwardInput)) and (action.stage, action.micro_batch) in away:
            held += 1
            away.discard((action.stage, action.micro_batch))
        most = max(most, held)
        held -= isinstance(action, ADDING_GRADIENTS)
    return most


def _arrival(placement: Placement, computation: Computation, ends: dict[tuple[bool, int, int], float]) -> float | None:
    """When what it needs is there; None while unknown."""
    if isinstance(computation, BackwardWeight):
        return 0.0
    forward = isinstance(computation, Forward)
    before = computation.stage + (-1 if forward else 1)
    if not 0 <= before <= placement.last_stage:
        return 0.0
    return ends.get((forward, before, computation.micro_batch))
