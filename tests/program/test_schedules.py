"""Schedules do what the papers say: every order can run, bubbles and activations are those of the formulae."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest

from syncline.placement import Placement
from syncline.program.abstract_state import Violation
from syncline.program.actions import Backward, Forward, PointToPoint
from syncline.program.costs import BACKWARD_COST, bubble_fraction
from syncline.program.messages import messages_in_flight
from syncline.program.schedules import SCHEDULES
from syncline.program.schedules.alternating import groups, live_limit
from syncline.program.verify import verify
from syncline.strategy import Strategy
from syncline.topology import Topology
from tests.program.examples import small_program

MICRO_BATCHES = (*range(1, 13), 16, 17, 31)


def step(positions: int, per_position: int, micro_batches: int, schedule: str = "1F1B", **options):
    return small_program(
        Strategy(
            topology=Topology(pp=positions),
            virtual_stages=per_position,
            micro_batches=micro_batches,
            schedule=schedule,
            **options,
        )
    )


def computations(positions: int, per_position: int, position: int, micro_batches: int, schedule: str) -> list:
    return list(SCHEDULES[schedule](Placement(positions, per_position), position, micro_batches))


def most_waiting(order: list) -> int:
    """The most forwards whose backward is still to come."""
    most = waiting = 0
    for action in order:
        waiting += 1 if isinstance(action, Forward) else -1
        most = max(most, waiting)
    return most


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("positions", [1, 2, 3, 4, 8])
def test_every_stage_computes_every_micro_batch_once(schedule, positions):
    for per_position, micro_batches in product((1, 2, 3), MICRO_BATCHES):
        for position in range(positions):
            order = computations(positions, per_position, position, micro_batches, schedule)
            stages = Placement(positions, per_position).stages_at(position)
            wanted = {kind(stage, m) for kind in (Forward, Backward) for stage in stages for m in range(micro_batches)}
            assert len(order) == len(wanted)
            assert set(order) == wanted
            backwards = [action for action in order if isinstance(action, Backward)]
            assert all(order.index(Forward(a.stage, a.micro_batch)) < order.index(a) for a in backwards)


def test_one_stage_a_rank_is_the_papers_1f1b():
    """`positions - position - 1` forwards first, then forwards and backwards in turn."""
    for positions, micro_batches in product((1, 2, 4, 8), MICRO_BATCHES):
        for position in range(positions):
            warm_up = min(positions - position - 1, micro_batches)
            expected = [Forward(position, m) for m in range(warm_up)]
            for m in range(warm_up, micro_batches):
                expected += [Forward(position, m), Backward(position, m - warm_up)]
            expected += [Backward(position, m) for m in range(micro_batches - warm_up, micro_batches)]
            assert computations(positions, 1, position, micro_batches, "1F1B") == expected


def test_two_ranks_with_two_stages_each_interleave():
    """By hand: rank 0 has stages 0 and 2, and micro-batches go in pairs."""
    order = computations(2, 2, 0, 4, "VPP")
    assert " ".join(f"{type(a).__name__[0]}{a.stage}.{a.micro_batch}" for a in order) == (
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3"
    )


@pytest.mark.parametrize("positions", [2, 3, 4, 8])
def test_the_bubble_is_that_of_the_formula_for_any_number_of_micro_batches(positions):
    """(p - 1) / v forwards and backwards of a rank's layers, whether p divides k or not; below p micro-batches each
    round but the first waits for those that are missing.
    """
    for per_position, k in product((1, 2, 3), MICRO_BATCHES):
        idle = Fraction(positions - 1 + (per_position - 1) * max(0, positions - k), per_position)
        found = bubble_fraction(step(positions, per_position, k))
        assert found == pytest.approx(float(idle / (k + idle)), abs=1e-9), (per_position, k)


def test_backwards_cost_what_the_bubble_assumes():
    assert BACKWARD_COST == 2.0


@pytest.mark.parametrize("positions", [1, 2, 3, 4, 8])
def test_activations_are_those_of_the_formula(positions):
    for per_position, k, position in product((1, 2, 3), MICRO_BATCHES, range(positions)):
        placement = Placement(positions, per_position)
        limit = live_limit(placement, position, k)
        order = computations(positions, per_position, position, k, "1F1B")
        assert most_waiting(order) == min(limit, k * per_position)
        if positions > 1 and k % positions == 0 and per_position > 1:
            # The warm-up of the paper, and the forward after it.
            assert limit == 2 * (positions - position - 1) + (per_position - 1) * positions + 1


def test_no_group_is_smaller_than_the_ranks_unless_there_are_too_few_micro_batches():
    for positions, k in product(range(1, 17), range(1, 70)):
        sizes = [len(group) for group in groups(Placement(positions, 2), k)]
        assert sum(sizes) == k
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= min(positions, k)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_verifies(schedule):
    for positions, per_position, k in product((2, 3, 5, 8), (1, 2, 3), (1, 2, 5, 7, 23)):
        verify(step(positions, per_position, k, schedule))


def test_a_large_pipeline_verifies():
    verify(step(64, 1, 512))
    verify(step(16, 4, 130))


class TestMessagesInFlight:
    def test_no_more_than_needed(self):
        assert step(4, 1, 16).messages_in_flight == 2
        # Groups of 11 and 12: while the first rank is busy with a group, five outputs of the last rank wait for it.
        assert step(8, 2, 23).messages_in_flight == 5

    def test_one_less_would_deadlock(self):
        program = step(8, 2, 23)
        with pytest.raises(Violation, match="it waits for ever"):
            verify(replace(program, messages_in_flight=4))

    def test_what_nobody_sends_is_left_to_the_verifier(self):
        ranks = [[a for a in actions if not isinstance(a, PointToPoint)] for actions in step(2, 1, 2).ranks[:1]]
        ranks.append([a for a in step(2, 1, 2).ranks[1] if isinstance(a, PointToPoint)])
        assert messages_in_flight(ranks) == 2
