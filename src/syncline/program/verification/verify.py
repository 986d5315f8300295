"""Proves a program correct before anything runs, for all ranks at once.

The six rules:

1. Every receive has its send, in an order that cannot deadlock.
2. Every parameter's gradient of every micro-batch is inside exactly one reduction per group that needs it.
3. No read before its wait, no write between start and wait, no use after free, nothing leaked at the end. The same for
   parameters that are gathered: nobody computes with outdated ones.
4. Collectives are issued in the same order by every member of their group.
5. The product of all scales on the path of a gradient is exactly the target.
6. Storage of gradients and of gathered parameters by liveness peaks at what the program declares.

The proof is an abstract run: every rank executes its list on symbolic gradients. A storage's content is, for every
micro-batch, a coefficient (an exact fraction), the axes over which it is reduced, and whether it is so in the owned
part only. Averages, sums, scales act on coefficients; when the optimizer reads the gradient, every micro-batch must be
there once, cover every replica and carry exactly the target. `program/rules/` has the rules, by subject.
"""

from __future__ import annotations

from dataclasses import dataclass

from syncline.program.actions import (
    COMPUTATIONS,
    Action,
    ClipGradients,
    OptimizerStep,
    PointToPoint,
)
from syncline.program.program import Program
from syncline.program.verification.gradients import GradientRules
from syncline.program.verification.handlers import Handler, World
from syncline.program.verification.parameters import ParameterRules
from syncline.program.verification.pipeline import PipelineRules
from syncline.program.verification.state import Blocked, RankState, Violation
from syncline.program.verification.totals import TotalRules


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
    return _AbstractRun(program, updates).run()


class _AbstractRun:
    def __init__(self, program: Program, updates: bool) -> None:
        self._program = program
        world = World.of(program, updates=updates)
        self._gradients = GradientRules(world)
        self._parameters = ParameterRules(world)
        self._pipeline = PipelineRules(world, self._gradients, self._parameters)
        self._ranks = [RankState(number) for number in range(program.topology.world_size)]
        self._handlers: dict[type[Action], Handler] = {
            **TotalRules(world).handlers,
            **self._pipeline.handlers,
            **self._gradients.handlers,
            **self._parameters.handlers,
        }

    def run(self) -> Verified:
        for rank in self._ranks:
            self._gradients.start(rank)
            self._parameters.start(rank)
        moved = True
        while moved:
            moved = False
            for rank in self._ranks:
                moved |= self._advance(rank)
        for rank in self._ranks:
            actions = self._program.ranks[rank.number]
            if rank.position < len(actions):
                action = actions[rank.position]
                rule = 1 if isinstance(action, PointToPoint) else 4
                raise Violation(rule, rank.number, action, "it waits for ever")
        for rank in self._ranks:
            for rules in (self._pipeline, self._gradients, self._parameters):
                rules.require_at_end(rank)
        return Verified(
            tuple(rank.peak_bytes for rank in self._ranks), tuple(rank.peak_gathered_bytes for rank in self._ranks)
        )

    def _advance(self, rank: RankState) -> bool:
        actions = self._program.ranks[rank.number]
        before = rank.position
        while rank.position < len(actions):
            action = actions[rank.position]
            self._require_during(rank, action)
            try:
                self._handlers[type(action)](rank, action)
            except Blocked:
                break
            self._follow_updates(rank, action)
            rank.position += 1
        return rank.position != before

    def _require_during(self, rank: RankState, action: Action) -> None:
        """What happens during a computation stands right behind it, so that nothing is issued in between."""
        during = getattr(action, "during", None)
        if during is not None and during not in rank.inside:
            raise Violation(
                4, rank.number, action, "it does not stand right behind the computation during which it happens"
            )
        if during is None:
            rank.inside = [action] if isinstance(action, COMPUTATIONS) else []

    def _follow_updates(self, rank: RankState, action: Action) -> None:
        """Both kinds of rules have a say in an update: it reads a gradient and writes parameters."""
        if isinstance(action, OptimizerStep):
            self._parameters.outdate(rank, action)
        elif isinstance(action, ClipGradients):
            self._parameters.outdate_the_rest(rank)
