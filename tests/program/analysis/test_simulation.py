"""When computations run, by hand; and what follows from it: bubbles, and the choice of a schedule."""

from __future__ import annotations

from itertools import product

import pytest

from syncline.program.actions import (
    COMPUTATIONS,
    Backward,
    BackwardInput,
    BackwardWeight,
    Bubble,
    Computation,
    Forward,
    ReceiveActivation,
    ReceiveGradient,
)
from syncline.program.analysis.best_schedule import best, candidates
from syncline.program.analysis.costs import simulated_time
from syncline.program.analysis.simulation import EQUAL, Costs, length, most_activations, simulate
from syncline.program.verification.verify import verify
from syncline.schedules import BEST, BOUNDED, SCHEDULES, V_SHAPED, schedule_named
from syncline.schedules.placement import Placement
from syncline.strategy import Strategy
from syncline.strategy.topology import Topology
from tests.program.examples import small_program

TWO = Placement(2)


def orders(schedule: str, placement: Placement, micro_batches: int, most: int = 0) -> list[list]:
    chosen = schedule_named(schedule, most)
    return [list(chosen(placement, position, micro_batches)) for position in range(placement.positions)]


class TestSimulation:
    def test_two_ranks_by_hand(self):
        costs = Costs(forward=2, backward_input=3, backward_weight=1, stages=(1, 2))
        first, second = simulate(TWO, orders("1F1B", TWO, 2), costs)
        assert [(type(m.computation), m.begin, m.end, m.waited) for m in second] == [
            (Forward, 2, 6, 2),
            (Backward, 6, 14, 0),
            (Forward, 14, 18, 0),
            (Backward, 18, 26, 0),
        ]
        assert [(type(m.computation), m.begin, m.end, m.waited) for m in first] == [
            (Forward, 0, 2, 0),
            (Forward, 2, 4, 0),
            (Backward, 14, 18, 10),
            (Backward, 26, 30, 8),
        ]
        assert length((first, second)) == 30

    def test_a_second_half_waits_for_nobody_and_nobody_for_it(self):
        halved: list[list[Computation]] = [
            [Forward(0, 0), BackwardInput(0, 0), BackwardWeight(0, 0)],
            [Forward(1, 0), BackwardInput(1, 0)],
        ]
        halved[1].append(BackwardWeight(1, 0))
        first, second = simulate(TWO, halved)
        assert [moment.begin for moment in second] == [1, 2, 3]
        assert [moment.begin for moment in first] == [0, 3, 4]

    def test_what_can_never_run_is_left_out(self):
        first, second = simulate(TWO, [[Forward(0, 0), Backward(0, 0)], [Backward(1, 0), Forward(1, 0)]])
        assert len(first) == 2, "nobody here asks whether its own forward came first"
        first, second = simulate(TWO, [[Backward(0, 0), Forward(0, 0)], [Forward(1, 0), Backward(1, 0)]])
        assert (first, second) == ((), ())


class TestBubbles:
    @pytest.mark.parametrize("schedule", [*SCHEDULES, *BOUNDED])
    def test_they_are_all_that_a_step_takes_but_computations(self, schedule):
        for positions, k, ahead in product((2, 3, 4), (1, 3, 8), (False, True)):
            stages = 2 if schedule in (*V_SHAPED, "VPP") else 1
            program = small_program(
                Strategy(
                    topology=Topology(pp=positions, dp=2),
                    schedule=schedule,
                    virtual_stages=stages,
                    micro_batches=k,
                    receive_ahead=ahead,
                )
            )
            verify(program)
            for actions in program.ranks:
                bubbles = [action for action in actions if isinstance(action, Bubble)]
                assert [bubble.index for bubble in bubbles] == list(range(len(bubbles)))
                busy = sum(EQUAL.of(action) for action in actions if isinstance(action, COMPUTATIONS))
                assert busy + sum(bubble.capacity for bubble in bubbles) == simulated_time(program)

    def test_each_stands_before_the_message_that_is_waited_for_the_last_behind_everything_computed(self):
        program = small_program(Strategy(topology=Topology(pp=2), micro_batches=2))
        first, second = program.ranks
        kinds = (*COMPUTATIONS, Bubble, ReceiveActivation, ReceiveGradient)
        assert [action for action in first if isinstance(action, kinds)] == [
            *(Forward(0, 0), Forward(0, 1)),
            *(Bubble(0, 2.0), ReceiveGradient(0, 0, 1), Backward(0, 0)),
            *(Bubble(1, 1.0), ReceiveGradient(0, 1, 1), Backward(0, 1)),
        ]
        assert [action for action in second if isinstance(action, kinds)] == [
            *(Bubble(0, 1.0), ReceiveActivation(1, 0, 0), Forward(1, 0), Backward(1, 0)),
            *(ReceiveActivation(1, 1, 0), Forward(1, 1), Backward(1, 1)),
            Bubble(1, 2.0),
        ]

    def test_one_stage_has_none(self):
        program = small_program(Strategy(topology=Topology(dp=2), micro_batches=2))
        assert not any(isinstance(action, Bubble) for actions in program.ranks for action in actions)


class TestBounded:
    @pytest.mark.parametrize("positions", [1, 2, 3, 4, 8])
    def test_no_rank_ever_holds_more_than_the_limit(self, positions):
        for stages, folded, k in product((1, 2, 3), (False, True), (1, 2, 3, 5, 8, 17)):
            placement = Placement(positions, stages, folded)
            for most in range(stages, 2 * placement.stages + 2):
                found = orders("Bounded", placement, k, most)
                assert all(most_activations(order) <= most for order in found), (stages, folded, k, most)
                moments = simulate(placement, found)
                assert [len(own) for own in moments] == [3 * stages * k] * positions, "something waits for ever"

    def test_the_least_limit_is_one_micro_batch_after_the_other(self):
        for positions, k in product((2, 4), (1, 3, 8)):
            moments = simulate(Placement(positions), orders("Bounded", Placement(positions), k, 1))
            # The second half of a backward delays the next forward, and nothing else: the way there and back is the
            # longer one.
            assert length(moments) == k * 2 * positions + k

    def test_with_room_enough_ranks_wait_for_the_first_forward_only(self):
        for positions, k in product((2, 3, 4, 8), (8, 9, 16, 40)):
            if k < positions:
                continue
            placement = Placement(positions)
            found = length(simulate(placement, orders("Bounded", placement, k, 2 * positions - 1)))
            assert found == 3 * k + positions - 1, (positions, k)

    def test_less_memory_is_never_faster(self):
        for positions, k in product((2, 4, 8), (3, 8, 32)):
            placement = Placement(positions)
            limits = range(1, 2 * positions)
            times = [length(simulate(placement, orders("Bounded", placement, k, most))) for most in limits]
            assert times == sorted(times, reverse=True), (positions, k)


def equal_stages(positions: int, layers: int):
    """Costs of stages in forwards through a rank's layers, where each stage has as many layers as any other."""

    def costs_of(stages: int) -> Costs | None:
        return Costs(stages=(positions / stages,) * stages) if stages <= layers else None

    return costs_of


class TestBest:
    def strategy(self, **decisions) -> Strategy:
        return Strategy(**{"topology": Topology(pp=4), "schedule": BEST, "micro_batches": 8, **decisions})

    def test_none_of_those_within_the_limit_is_shorter(self):
        for positions, k, limit in product((2, 4), (1, 3, 8, 16), (1, 1.5, 2, 4, 7)):
            strategy = self.strategy(topology=Topology(pp=positions), micro_batches=k, activation_limit=limit)
            costs = equal_stages(positions, 12)
            chosen = best(strategy, costs)
            assert chosen is not None
            assert chosen.activations <= limit
            others = [each.time for each in candidates(strategy, costs) if each.activations <= limit]
            assert chosen.time == min(others) >= 3 * k

    def test_what_is_chosen_holds_and_takes_in_the_program_what_was_found(self):
        for k, limit in product((3, 8), (1, 2, 4)):
            chosen = best(self.strategy(micro_batches=k, activation_limit=limit), equal_stages(4, 16))
            assert chosen is not None
            program = small_program(chosen.strategy, layers=16)
            verify(program)
            stages = chosen.strategy.virtual_stages
            assert simulated_time(program) / stages == pytest.approx(chosen.time)
            assert max(map(most_activations, program.ranks)) / stages == chosen.activations

    def test_stages_are_as_many_as_asked_for_or_as_there_are_layers_for(self):
        assert {each.strategy.virtual_stages for each in candidates(self.strategy(), equal_stages(4, 12))} == {1, 2, 3}
        asked = self.strategy(virtual_stages=3)
        assert {each.strategy.virtual_stages for each in candidates(asked, equal_stages(4, 12))} == {3}
        assert best(asked, equal_stages(4, 11)) is None

    def test_an_expensive_last_stage_counts(self):
        """With one layer a stage and a head as expensive as three, more stages let the others wait for one rank all the
        more: the fewest are as good.
        """

        def costs_of(stages: int) -> Costs | None:
            return {4: Costs(stages=(1, 1, 1, 4)), 8: Costs(stages=(0.5,) * 7 + (3.5,))}.get(stages)

        chosen = best(self.strategy(activation_limit=100), costs_of)
        assert chosen is not None
        assert chosen.strategy.placement.folded, "the last stage shares its rank with the first one, and nobody's"
        assert chosen.busy == 8 * 3 * (0.5 + 3.5)
