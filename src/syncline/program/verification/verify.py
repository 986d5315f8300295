"""Proves a program correct before anything runs, for all ranks at once.

The six rules:

1. Every receive has its send, in an order that cannot deadlock.
2. Every parameter's gradient of every micro-batch is inside exactly one reduction per group that needs it.
3. No read before its wait, no write between start and wait, no use after free, nothing leaked at the end. The same for
   parameters that are gathered: nobody computes with outdated ones.
4. Collectives are issued in the same order by every member of their group.
5. The product of all scales on the path of a gradient is exactly the target.
6. Storage of gradients and of gathered parameters by liveness peaks at what the program declares.

The proof is an abstract run (`program.interpreter`): every rank executes its list on symbolic gradients. A storage's
content is, for every micro-batch, a coefficient (an exact fraction), the axes over which it is reduced, and whether it
is so in the owned part only. Averages, sums, scales act on coefficients; when the optimizer reads the gradient, every
micro-batch must be there once, cover every replica and carry exactly the target. The files beside this one have the
rules, by subject. Channels are Gloo's in the proof; that the program comes to its end on NCCL's as well is proven
besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from syncline.program.actions import (
    COMPUTATIONS,
    Action,
    ClipGradients,
    OptimizerStep,
    PointToPoint,
)
from syncline.program.interpreter import ChannelKind, Collective, Meaning, Stuck, interpret
from syncline.program.program import Program
from syncline.program.verification.gradients import GradientRules
from syncline.program.verification.parameters import ParameterRules
from syncline.program.verification.pipeline import PipelineRules
from syncline.program.verification.state import RankState, Violation
from syncline.program.verification.totals import TotalRules
from syncline.program.verification.world import Rules, Snapshot, World, require_same_collective


@dataclass(frozen=True)
class Verified:
    """What the abstract run found out on the way."""

    peak_gradient_bytes: tuple[int, ...]
    peak_gathered_bytes: tuple[int, ...]


def verify(program: Program, *, updates: bool = True) -> Verified:
    """Run the program abstractly on all ranks. Without `updates` it is one of forwards alone, as for an evaluation.

    Raises:
        Violation: the first rule found broken.
    """
    proof = _Proof(program, updates)
    stuck = _run(program, proof, ChannelKind.GLOO)
    if stuck:
        raise _waits_for_ever(stuck[0], ChannelKind.GLOO)
    proof.require_at_end()
    stuck = _run(program, Meaning(), ChannelKind.NCCL)
    if stuck:
        raise _waits_for_ever(stuck[0], ChannelKind.NCCL)
    return proof.found()


def _run(program: Program, meaning: Meaning, channels: ChannelKind) -> list[Stuck]:
    return interpret(
        dict(enumerate(program.ranks)),
        program.members,
        meaning,
        capacity=program.messages_in_flight,
        channels=channels,
    )


def _waits_for_ever(stuck: Stuck, channels: ChannelKind) -> Violation:
    rule = 1 if isinstance(stuck.action, PointToPoint) else 4
    return Violation(rule, stuck.rank, stuck.action, f"it waits for ever on channels as {channels.value} has them")


class _Proof(Meaning):
    """Every rank on symbolic gradients; raises `Violation` at the first rule found broken."""

    def __init__(self, program: Program, updates: bool) -> None:
        world = World.of(program, updates=updates)
        self._gradients = GradientRules(world)
        self._parameters = ParameterRules(world)
        self._pipeline = PipelineRules(world, self._gradients, self._parameters)
        self._ranks = [RankState(number) for number in range(program.topology.world_size)]
        self._rules = Rules()
        for rules in (TotalRules(world), self._pipeline, self._gradients, self._parameters):
            self._rules.add(rules.rules)
        for rank in self._ranks:
            self._gradients.start(rank)
            self._parameters.start(rank)

    def require_at_end(self) -> None:
        for rank in self._ranks:
            for rules in (self._pipeline, self._gradients, self._parameters):
                rules.require_at_end(rank)

    def found(self) -> Verified:
        return Verified(
            tuple(rank.peak_bytes for rank in self._ranks), tuple(rank.peak_gathered_bytes for rank in self._ranks)
        )

    def perform(self, rank: int, position: int, action: Action) -> None:
        state = self._at(rank, position, action)
        self._rules.perform[type(action)](state, action)
        if isinstance(action, OptimizerStep):  # It reads a gradient, and writes parameters.
            self._parameters.outdate(state, action)

    def send(self, rank: int, position: int, action: PointToPoint) -> Fraction:
        return self._pipeline.send(self._at(rank, position, action), action)

    def start_receiving(self, rank: int, position: int, action: PointToPoint) -> None:
        self._pipeline.start_receiving(self._at(rank, position, action), action)

    def receive(self, rank: int, position: int, action: PointToPoint, sent: PointToPoint, message: Fraction) -> None:
        self._pipeline.receive(self._at(rank, position, action), action, sent, message)

    def join(self, rank: int, position: int, action: Action, collective: Collective) -> Snapshot:
        state = self._at(rank, position, action)
        snapshot = self._rules.join[type(action)](state, action)
        require_same_collective(state, action, collective)
        return snapshot

    def complete(self, rank: int, position: int, action: Action, collective: Collective | None) -> None:
        state = self._at(rank, position, action)
        if type(action) in self._rules.complete:
            self._rules.complete[type(action)](state, action, collective)
        if isinstance(action, ClipGradients):  # From the norm on, owners update.
            self._parameters.outdate_the_rest(state)

    def _at(self, rank: int, position: int, action: Action) -> RankState:
        """The state of the rank, which has come to `position`."""
        state = self._ranks[rank]
        state.position = position
        during = getattr(action, "during", None)
        if during is not None and during not in state.inside:
            what = "it does not stand right behind the computation during which it happens"
            raise Violation(4, rank, action, what)
        if during is None:
            state.inside = [action] if isinstance(action, COMPUTATIONS) else []
        return state
