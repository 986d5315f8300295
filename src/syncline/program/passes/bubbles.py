"""Says where a rank will have nothing to do, and for how long, as far as a simulation can tell."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.program.actions import (
    COMPUTATIONS,
    Action,
    BackwardWeight,
    Bubble,
    ClipGradients,
    Forward,
    ReceiveActivation,
    ReceiveGradient,
    ReduceReplicated,
)
from syncline.program.analysis.costs import simulated
from syncline.program.analysis.simulation import Moment, length
from syncline.program.program import Program


def mark_bubbles(program: Program) -> Program:
    """A `Bubble` before every message that a rank waits for; and where all that it does by itself is done, if others
    still compute.

    The last of all passes: it depends on the order of computations, and nothing depends on it.
    """
    moments = simulated(program)
    step = length(moments)

    def change(rank: int, actions: Sequence[Action]) -> list[Action]:
        own = moments[program.topology.position(rank)]
        capacities = _before_receives(own, actions)
        if own and own[-1].end < step:
            capacities[_behind_computations(actions)] = step - own[-1].end
        changed: list[Action] = []
        found = 0
        for index, action in enumerate(actions):
            if index in capacities:
                changed.append(Bubble(found, capacities[index]))
                found += 1
            changed.append(action)
        return changed

    return program.map_ranks(change)


def _before_receives(moments: Sequence[Moment], actions: Sequence[Action]) -> dict[int, float]:
    """How long is waited for the receives at these positions, and for those that follow at once."""
    waits = {}
    for moment in moments:
        computation = moment.computation
        if isinstance(computation, BackwardWeight):
            continue  # It waits for nobody.
        message = ReceiveActivation if isinstance(computation, Forward) else ReceiveGradient
        waits[message, computation.stage, computation.micro_batch] = moment.waited
    capacities: dict[int, float] = {}
    start = 0
    for index, action in enumerate(actions):
        if not isinstance(action, (ReceiveActivation, ReceiveGradient)):
            start = index + 1
        elif (wait := waits[type(action), action.stage, action.micro_batch]) > 0:
            capacities[start] = wait
    return capacities


def _behind_computations(actions: Sequence[Action]) -> int:
    """The position of what first waits for the other ranks of the pipeline once all is computed and reduced."""
    last = max(index for index, action in enumerate(actions) if isinstance(action, COMPUTATIONS))
    return next(
        index
        for index in range(last + 1, len(actions))
        if isinstance(actions[index], (ReduceReplicated, ClipGradients))
    )
