"""Schedules do what the papers say: every order can run, bubbles and activations are those of the formulae."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest

from syncline.program.actions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    ClipGradients,
    Computation,
    Forward,
    ReduceReplicated,
    SendActivation,
)
from syncline.program.analysis.capacity import messages_in_flight
from syncline.program.analysis.costs import bubble_fraction
from syncline.program.analysis.simulation import EQUAL
from syncline.program.verification.state import Violation
from syncline.program.verification.verify import verify
from syncline.schedules import BOUNDED, SCHEDULES, V_SHAPED, schedule_named
from syncline.schedules.alternating import groups, live_limit
from syncline.schedules.placement import Placement
from syncline.strategy import Strategy
from syncline.strategy.topology import Topology
from tests.program.examples import small_program

HALVES = (Forward, BackwardInput, BackwardWeight)
MICRO_BATCHES = (*range(1, 13), 16, 17, 31)


def step(positions: int, per_position: int, micro_batches: int, schedule: str = "1F1B", **options):
    return small_program(
        Strategy(
            topology=Topology(pp=positions),
            virtual_stages=2 if schedule in V_SHAPED else per_position,
            micro_batches=micro_batches,
            schedule=schedule,
            **options,
        )
    )


def computations(positions: int, per_position: int, position: int, micro_batches: int, schedule: str) -> list:
    placement = placement_of(positions, per_position, schedule)
    return list(schedule_named(schedule, placement.stages)(placement, position, micro_batches))


def placement_of(positions: int, per_position: int, schedule: str) -> Placement:
    return Placement(positions, 2, folded=True) if schedule in V_SHAPED else Placement(positions, per_position)


def most_waiting(order: list) -> int:
    """The most forwards whose backward, with both halves, is still to come."""
    most = waiting = 0
    for action in order:
        waiting += isinstance(action, Forward) - isinstance(action, (Backward, BackwardWeight))
        most = max(most, waiting)
    return most


@pytest.mark.parametrize("schedule", [*SCHEDULES, *BOUNDED])
@pytest.mark.parametrize("positions", [1, 2, 3, 4, 8])
def test_every_stage_computes_every_micro_batch_once(schedule, positions):
    for per_position, micro_batches in product((1, 2, 3), MICRO_BATCHES):
        for position in range(positions):
            order = computations(positions, per_position, position, micro_batches, schedule)
            place = {action: index for index, action in enumerate(order)}
            assert len(place) == len(order)
            stages = placement_of(positions, per_position, schedule).stages_at(position)
            for stage, m in product(stages, range(micro_batches)):
                whole = [place.get(kind(stage, m)) for kind in (Forward, Backward)]
                halved = [place.get(kind(stage, m)) for kind in HALVES]
                (places,) = (found for found in (whole, halved) if None not in found)
                assert places == sorted(place for place in places if place is not None)
            assert sum(isinstance(action, Forward) for action in order) == len(stages) * micro_batches


def test_one_stage_a_rank_is_the_papers_1f1b():
    """`positions - position - 1` forwards first, then forwards and backwards in turn."""
    for positions, micro_batches in product((1, 2, 4, 8), MICRO_BATCHES):
        for position in range(positions):
            warm_up = min(positions - position - 1, micro_batches)
            expected: list[Computation] = [Forward(position, m) for m in range(warm_up)]
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


@pytest.mark.parametrize("positions", [2, 3, 4, 8])
def test_halved_backwards_fill_the_bubble_but_for_what_the_formula_says(positions):
    """(p - 1) * (F + I - W), a third of 1F1B's where all three are equal; with several stages a rank about as much."""
    for per_position, k in product((1, 2, 3), MICRO_BATCHES):
        if k < positions:
            continue
        idle = Fraction(positions - 1, 3 * per_position)
        least, found = float(idle / (k + idle)), bubble_fraction(step(positions, per_position, k, "ZBH1"))
        if per_position == 1:
            assert found == pytest.approx(least, abs=1e-9), k
        else:
            assert least - 1e-9 <= found <= 1.3 * least, (per_position, k)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_with_few_micro_batches_halved_backwards_fill_as_much_as_there_is(micro_batches):
    """Each micro-batch but one has a weight half that fills a forward or backward's wait on another rank."""
    idle = Fraction(2 * (4 - 1) - (micro_batches - 1), 3)
    found = bubble_fraction(step(4, 1, micro_batches, "ZBH1"))
    assert found == pytest.approx(float(idle / (micro_batches + idle)), abs=1e-9)


@pytest.mark.parametrize("positions", [2, 3, 4, 8])
def test_down_the_ranks_and_up_again_ranks_wait_as_long_as_the_formulae_say(positions):
    for k in (2 * positions, 2 * positions + 1, 5 * positions):
        idle = Fraction(positions - 1, 6)
        found = bubble_fraction(step(positions, 2, k, "ZBV"))
        assert found == pytest.approx(float(idle / (k + idle)), abs=1e-9), k
        longest = Fraction(positions, 6)
        assert bubble_fraction(step(positions, 2, k, "DualPipeV")) <= float(longest / (k + longest)) + 1e-9, k


def test_down_the_ranks_and_up_again_every_rank_holds_as_much():
    for positions, k in product((2, 3, 4, 8), (16, 17, 33)):
        assert {most_waiting(computations(positions, 2, p, k, "ZBV")) for p in range(positions)} == {2 * positions}
        assert all(
            most_waiting(computations(positions, 2, p, k, "DualPipeV")) <= 2 * positions + 1 for p in range(positions)
        )


def test_forward_and_halves_cost_the_same_and_a_backward_both_halves():
    forward, first, second, whole = (EQUAL.of(kind(0, 0)) for kind in (*HALVES, Backward))
    assert forward == first == second == whole / 2 == 1.0


def test_no_rank_holds_more_for_halved_backwards_than_the_first_one_holds_anyway():
    for positions, per_position, k in product((2, 3, 4, 8), (1, 2, 3), MICRO_BATCHES):
        first = most_waiting(computations(positions, per_position, 0, k, "1F1B"))
        for position in range(positions):
            assert most_waiting(computations(positions, per_position, position, k, "ZBH1")) <= first


def test_three_ranks_halve_as_in_the_paper():
    """By hand: the last rank puts off two weight halves, the middle one one, the first none."""
    orders = [computations(3, 1, position, 4, "ZBH1") for position in range(3)]
    letters = {Forward: "F", BackwardInput: "I", BackwardWeight: "W"}
    assert [" ".join(f"{letters[type(a)]}{a.micro_batch}" for a in order) for order in orders] == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


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


@pytest.mark.parametrize("schedule", [*SCHEDULES, *BOUNDED])
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
        ranks = dict(enumerate(step(8, 2, 23).ranks))
        assert messages_in_flight(ranks) == 5
        lost = next(action for action in ranks[0] if isinstance(action, SendActivation))
        assert messages_in_flight({**ranks, 0: [action for action in ranks[0] if action != lost]}) == 2


class TestHalvedBackwards:
    """A weight half that is lost, doubled or too early is found."""

    HALVED = step(3, 1, 4, "ZBH1")

    def broken(self, change) -> str:
        with pytest.raises(Violation) as error:
            verify(self.HALVED.map_ranks(change))
        return str(error.value)

    def test_a_lost_weight_half(self):
        lost = BackwardWeight(1, 2)
        message = self.broken(lambda rank, actions: [action for action in actions if action != lost])
        assert "bucket" in message
        assert "lacks micro-batches [2]" in message

    def test_a_lost_weight_half_of_a_stage_without_gradients(self):
        program = small_program(
            Strategy(topology=Topology(pp=2), micro_batches=2, schedule="ZBH1"),
            layers=2,
            frozen=("head", "layers.1.matrix", "layers.1.norm"),
        )
        verify(program)
        lost = BackwardWeight(1, 1)
        with pytest.raises(Violation, match="weight gradients of stage 1, micro-batch 1 are never computed"):
            verify(program.map_ranks(lambda rank, actions: [action for action in actions if action != lost]))

    def test_one_that_is_added_twice(self):
        twice = BackwardWeight(0, 1)
        message = self.broken(lambda rank, actions: [b for a in actions for b in ([a, a] if a == twice else [a])])
        assert "the same gradient is added twice" in message

    def test_one_that_comes_before_its_first_half(self):
        def swapped(rank, actions):
            early = {BackwardInput(0, 0): BackwardWeight(0, 0), BackwardWeight(0, 0): BackwardInput(0, 0)}
            return [early.get(action, action) for action in actions]

        assert "it comes before the first half of its backward" in self.broken(swapped)

    def test_a_reduction_before_the_last_weight_half(self):
        strategy = Strategy(topology=Topology(pp=2, dp=2), micro_batches=2, schedule="ZBH1", overlap=False)
        last = BackwardWeight(1, 1)

        def late(rank, actions):
            """The last weight half moves behind the reductions that wait for it."""
            if last not in actions:
                return actions
            rest = [action for action in actions if action != last]
            clip = next(i for i, action in enumerate(rest) if isinstance(action, ClipGradients))
            return [*rest[:clip], last, *rest[clip:]]

        with pytest.raises(Violation, match=r"micro-batch 1 of bucket . was not reduced over dp"):
            verify(small_program(strategy).map_ranks(late))


class TestCopiesOnOneRank:
    """Down the ranks and up again, the first rank has the embedding and the head that is tied to it."""

    TIED = small_program(
        Strategy(topology=Topology(pp=2), virtual_stages=2, micro_batches=4, schedule="ZBV"), tied=True, layers=4
    )

    def test_one_action_sums_them(self):
        verify(self.TIED)
        (summed,) = (action for action in self.TIED.ranks[0] if isinstance(action, ReduceReplicated))
        assert self.TIED.members(0, summed.group) == (0,)
        assert not any(isinstance(action, ReduceReplicated) for action in self.TIED.ranks[1])

    def test_without_it_they_differ(self):
        with pytest.raises(Violation, match="the copies of bucket"):
            verify(self.TIED.map_ranks(lambda _, actions: [a for a in actions if not isinstance(a, ReduceReplicated)]))

    def test_a_copy_that_lacks_a_micro_batch_is_found(self):
        lost = BackwardWeight(3, 1)
        with pytest.raises(Violation, match="a copy on this rank, holds something else"):
            verify(self.TIED.map_ranks(lambda _, actions: [action for action in actions if action != lost]))
