"""When the actions of a program take place, where computations, messages and collectives take given times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from syncline.program.actions import (
    ADDING_GRADIENTS,
    COMPUTATIONS,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Computation,
    Forward,
    OffloadActivations,
    PointToPoint,
)
from syncline.program.communicators import collective_communicator, message_communicator
from syncline.program.interpreter import STARTS, Collective, Meaning, interpret
from syncline.program.messages import with_messages
from syncline.schedules.placement import Placement
from syncline.strategy.topology import Topology


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


@dataclass(frozen=True)
class Span:
    """When one action takes place."""

    position: int
    """In the rank's actions."""
    action: Action
    begin: float
    end: float
    waited: float
    """How long the rank had nothing to do before: for the action, or for what it needs."""


class Timeline(Meaning):
    """Time as a meaning of actions.

    A rank does one thing at a time. A message takes its time on its channel, behind those before it; a collective, once
    all have joined it, on its communicator. What happens inside a computation takes no time of the rank.
    """

    def __init__(
        self,
        *,
        occupies: Callable[[Action], float] = lambda action: 0.0,
        message: Callable[[PointToPoint], float] = lambda action: 0.0,
        collective: Callable[[Action], float] = lambda action: 0.0,
    ) -> None:
        """How long an action occupies its rank, a message its channel, a collective its communicator."""
        self.spans: dict[int, list[Span]] = {}
        self._occupies = occupies
        self._message = message
        self._collective = collective
        self._now: defaultdict[int, float] = defaultdict(float)
        self._waited: defaultdict[int, float] = defaultdict(float)
        self._free: defaultdict[Hashable, float] = defaultdict(float)
        """When a channel or a communicator has done all that it was given."""
        self._ends: dict[int, float] = {}
        """Of the collectives that are done, by identity."""

    def perform(self, rank: int, position: int, action: Action) -> None:
        begin = self._now[rank]
        self._now[rank] = begin + self._occupies(action)
        self._note(rank, position, action, begin)

    def send(self, rank: int, position: int, action: PointToPoint) -> float:
        channel = message_communicator(rank, action)
        arrival = max(self._now[rank], self._free[channel]) + self._message(action)
        self._free[channel] = arrival
        self.perform(rank, position, action)
        return arrival

    def start_receiving(self, rank: int, position: int, action: PointToPoint) -> None:
        self.perform(rank, position, action)

    def receive(self, rank: int, position: int, action: PointToPoint, sent: PointToPoint, message: float) -> None:
        self._wait_until(rank, message)
        self.perform(rank, position, action)

    def join(self, rank: int, position: int, action: Action, collective: Collective) -> float:
        if type(action) in STARTS:
            self.perform(rank, position, action)
        return self._now[rank]

    def complete(self, rank: int, position: int, action: Action, collective: Collective | None) -> None:
        if collective is not None:
            self._wait_until(rank, self._end_of(collective))
        self.perform(rank, position, action)

    def _end_of(self, collective: Collective) -> float:
        if id(collective) not in self._ends:
            communicator = (collective.members, collective_communicator(collective.first))
            joined = max(time for _, time in collective.joined.values())
            self._free[communicator] = max(joined, self._free[communicator]) + self._collective(collective.first)
            self._ends[id(collective)] = self._free[communicator]
        return self._ends[id(collective)]

    def _wait_until(self, rank: int, time: float) -> None:
        waited = max(0.0, time - self._now[rank])
        self._waited[rank] += waited
        self._now[rank] += waited

    def _note(self, rank: int, position: int, action: Action, begin: float) -> None:
        waited = self._waited.pop(rank, 0.0) if self._now[rank] > begin else 0.0
        self.spans.setdefault(rank, []).append(Span(position, action, begin, self._now[rank], waited))


def simulate(
    placement: Placement, orders: Sequence[Sequence[Computation]], costs: Costs = EQUAL
) -> tuple[tuple[Moment, ...], ...]:
    """For each position in the pipeline when its computations run, in its own order: a rank waits for what another one
    has to send, and for nothing else. Messages take no time.

    Of an order in which something would wait for ever, what comes before that is there.
    """
    topology = Topology(pp=placement.positions)
    return simulate_pipeline(
        {position: list(with_messages(topology, placement, position, orders)) for position in range(len(orders))}, costs
    )


def simulate_pipeline(pipeline: Mapping[int, Sequence[Action]], costs: Costs = EQUAL) -> tuple[tuple[Moment, ...], ...]:
    """When the ranks of one pipeline compute. `pipeline` has their actions, of which computations alone take time."""
    needed = {
        rank: [action for action in actions if isinstance(action, (*COMPUTATIONS, PointToPoint))]
        for rank, actions in pipeline.items()
    }
    timeline = Timeline(occupies=lambda action: costs.of(action) if isinstance(action, COMPUTATIONS) else 0.0)
    interpret(needed, lambda rank, group: (), timeline, capacity=None)
    return tuple(
        tuple(
            Moment(span.action, span.begin, span.end, span.waited)
            for span in timeline.spans.get(rank, ())
            if isinstance(span.action, COMPUTATIONS)
        )
        for rank in pipeline
    )


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
