"""`best`: the schedule with the shortest simulated step, among those that hold no more activations than they may."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from syncline.program.analysis.simulation import Costs, length, most_activations, simulate
from syncline.schedules import BOUNDED, V_SHAPED, schedule_named
from syncline.strategy import Strategy

MOST_STAGES_PER_RANK = 4
"""More stages shorten a bubble that is short already, and send as many messages more."""

AROUND = ("1F1B", "ZBH1", "Bounded")
"""What is tried beside `V_SHAPED`. FThenB is never shorter than 1F1B."""


@dataclass(frozen=True)
class Candidate:
    """A schedule, and what a simulation says of it."""

    strategy: Strategy
    time: float
    """Of a step, in the unit of the costs it was simulated with."""
    busy: float
    """Of which the rank that computes longest computes."""
    activations: float
    """The most that a rank holds, in micro-batches through all of its layers."""

    @property
    def title(self) -> str:
        stages = self.strategy.virtual_stages
        return self.strategy.schedule + (f" with {stages} stages a rank" if stages > 1 else "")


def candidates(strategy: Strategy, costs_of: Callable[[int], Costs | None]) -> Iterator[Candidate]:
    """The schedules that `strategy`, whose own is `BEST`, could have.

    With `virtual_stages` above 1 only those with so many stages a rank. `costs_of` a number of stages is what their
    computations cost, in one unit for all; None where the model cannot be divided into so many.
    """
    asked = strategy.virtual_stages
    for per_rank in (asked,) if asked > 1 else range(1, MOST_STAGES_PER_RANK + 1):
        costs = costs_of(per_rank * strategy.topology.pp)
        if costs is not None:
            for schedule in AROUND + (V_SHAPED if per_rank == 2 else ()):
                for limit in _limits(strategy) if schedule in BOUNDED else (strategy.activation_limit,):
                    form = replace(strategy, schedule=schedule, virtual_stages=per_rank, activation_limit=limit)
                    yield _simulated(form, costs)


def best(strategy: Strategy, costs_of: Callable[[int], Costs | None]) -> Candidate | None:
    """The shortest of the `candidates` within the limit; of equally short ones that with the fewest stages a rank, then
    that with the fewest activations. None where the model cannot be divided into any number of stages.
    """
    # Bounded schedules hold what they may, so there is one wherever there is any.
    within = [each for each in candidates(strategy, costs_of) if each.activations <= strategy.allowed_activations]
    return min(within, key=_time_stages_activations, default=None)


def _limits(strategy: Strategy) -> Iterator[float | None]:
    """What bounded schedules may hold: all that is allowed, or as much as mostly suffices."""
    yield strategy.activation_limit
    if strategy.allowed_activations > strategy.topology.pp:
        yield None


def _time_stages_activations(candidate: Candidate) -> tuple[float, int, float]:
    return round(candidate.time, 9), candidate.strategy.virtual_stages, candidate.activations


def _simulated(strategy: Strategy, costs: Costs) -> Candidate:
    placement, schedule = strategy.placement, schedule_named(strategy.schedule, strategy.most_activations)
    orders = [list(schedule(placement, position, strategy.micro_batches)) for position in range(placement.positions)]
    held = max(map(most_activations, orders))
    busy = max(sum(map(costs.of, order)) for order in orders)
    return Candidate(strategy, length(simulate(placement, orders, costs)), busy, held / placement.per_position)
