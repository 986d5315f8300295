"""What forwards save is moved by each of them, once, and is not counted while it is away."""

from __future__ import annotations

from itertools import product

import pytest

from syncline.program.actions import (
    COMPUTATIONS,
    Backward,
    BackwardInput,
    Forward,
    GatherParameters,
    OffloadActivations,
)
from syncline.program.analysis.costs import peak_activations
from syncline.program.display.text import listing
from syncline.program.verification.verify import verify
from syncline.schedules import BOUNDED, HALVED, SCHEDULES, V_SHAPED
from syncline.strategy import Sharding, Strategy
from syncline.strategy.topology import Topology
from tests.program.breaking import assert_rejected, doubled, first, replaced
from tests.program.examples import small_forward_program, small_program


def offloading(schedule: str = "1F1B", positions: int = 2, micro_batches: int = 3, **choices) -> Strategy:
    return Strategy(
        topology=Topology(pp=positions, dp=2),
        schedule=schedule,
        virtual_stages=2 if schedule in V_SHAPED or schedule == "VPP" else 1,
        micro_batches=micro_batches,
        offload_activations=True,
        **choices,
    )


@pytest.mark.parametrize("schedule", [*SCHEDULES, *BOUNDED])
def test_every_forward_moves_what_it_saves_before_all_else_inside_it(schedule):
    for positions, micro_batches in product((1, 2, 4), (1, 3, 8)):
        program = small_program(offloading(schedule, positions, micro_batches))
        verify(program)
        for actions in program.ranks:
            moves = {actions[i + 1]: action for i, action in enumerate(actions) if isinstance(action, Forward)}
            assert moves == {OffloadActivations(f.stage, f.micro_batch, f): f for f in moves.values()}
            assert sum(isinstance(action, OffloadActivations) for action in actions) == len(moves)


def test_it_reads_as_what_it_does():
    assert listing(small_program(offloading()), 0)[:3] == [
        "count tokens over dp",
        "forward 0",
        "offload activations 0 during forward 0",
    ]


def test_it_stands_before_the_gathers_of_its_forward():
    strategy = Strategy(topology=Topology(sharding=2), sharding=Sharding.STAGE3, offload_activations=True)
    actions = list(small_program(strategy).ranks[0])
    assert any(isinstance(action, GatherParameters) and action.during is not None for action in actions)
    assert isinstance(actions[first(actions, Forward) + 1], OffloadActivations)


@pytest.mark.parametrize("schedule", [*SCHEDULES, *BOUNDED])
def test_a_rank_holds_what_it_computes_with(schedule):
    """Whole backwards hold one at a time; halved ones what waits for its second half, and one more."""
    for positions, micro_batches in product((2, 4), (1, 3, 8)):
        program = small_program(offloading(schedule, positions, micro_batches))
        for rank, actions in enumerate(program.ranks):
            halves = most = 0
            for action in actions:
                if isinstance(action, COMPUTATIONS):
                    most = max(most, halves + 1) if isinstance(action, (Forward, Backward, BackwardInput)) else most
                    halves += isinstance(action, BackwardInput) - (type(action).__name__ == "BackwardWeight")
            assert peak_activations(program, rank) == most
            assert most == 1 or schedule in HALVED


def test_forwards_without_backwards_move_nothing():
    program = small_forward_program(offloading(), 2)
    assert not any(isinstance(action, OffloadActivations) for actions in program.ranks for action in actions)


def test_the_verifier_refuses_what_is_not_there_to_move():
    program = small_program(offloading())
    assert_rejected(program, replaced(OffloadActivations, micro_batch=1), 3)
    assert_rejected(program, doubled(OffloadActivations), 3)
