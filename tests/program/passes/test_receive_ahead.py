"""Messages that come ahead: in order, each waited for, none before its turn."""

from __future__ import annotations

import pytest

from syncline.program.actions import (
    COMPUTATIONS,
    ReceiveActivation,
    ReceiveGradient,
    StartReceivingActivation,
    StartReceivingGradient,
)
from syncline.program.display.text import listing
from syncline.program.verification.state import Violation
from syncline.program.verification.verify import verify
from syncline.schedules import BOUNDED, SCHEDULES, V_SHAPED
from syncline.strategy import Strategy
from syncline.strategy.topology import Topology
from tests.program.examples import small_program

RECEIVES, STARTS = (ReceiveActivation, ReceiveGradient), (StartReceivingActivation, StartReceivingGradient)


def ahead(schedule: str = "1F1B", positions: int = 2, micro_batches: int = 3):
    stages = 2 if schedule in V_SHAPED or schedule == "VPP" else 1
    return small_program(
        Strategy(
            topology=Topology(pp=positions),
            schedule=schedule,
            virtual_stages=stages,
            micro_batches=micro_batches,
            receive_ahead=True,
        )
    )


def test_what_the_next_computation_needs_is_asked_for_before_the_one_in_front_of_it():
    words = ("forward", "backward", "receive", "start receiving")
    assert [line for line in listing(ahead(), 0) if line.startswith(words)] == [
        "forward 0",
        "start receiving gradient 0 from rank 1",
        "forward 1",
        "receive gradient 0 from rank 1",
        "backward 0",
        "start receiving gradient 1 from rank 1",
        "forward 2",
        "receive gradient 1 from rank 1",
        "start receiving gradient 2 from rank 1",
        "backward 1",
        "receive gradient 2 from rank 1",
        "backward 2",
    ]


@pytest.mark.parametrize("schedule", [*SCHEDULES, *BOUNDED])
def test_every_receive_but_the_first_is_started_one_computation_ahead(schedule):
    for positions, micro_batches in ((2, 1), (2, 5), (3, 7), (4, 8)):
        program = ahead(schedule, positions, micro_batches)
        verify(program)
        for actions in program.ranks:
            places = {action: place for place, action in enumerate(actions)}
            computed = [place for place, action in enumerate(actions) if isinstance(action, COMPUTATIONS)]
            for receive in (action for action in actions if isinstance(action, RECEIVES)):
                before = [place for place in computed if place < places[receive]]
                start = STARTS[RECEIVES.index(type(receive))](receive.stage, receive.micro_batch, receive.peer)
                assert (start in places) == bool(before)
                if before:
                    assert places[start] < before[-1]
                    assert not [place for place in computed if places[start] < place < before[-1]]


class TestFaults:
    PROGRAM = ahead(micro_batches=4)

    def broken(self, change) -> str:
        with pytest.raises(Violation) as error:
            verify(self.PROGRAM.map_ranks(change))
        return str(error.value)

    def test_one_that_is_never_waited_for(self):
        start = StartReceivingGradient(0, 3, 1)
        message = self.broken(lambda rank, actions: [*actions, start] if rank == 0 else actions)
        assert "it is never waited for" in message

    def test_two_in_the_wrong_order(self):
        first, second = StartReceivingGradient(0, 1, 1), StartReceivingGradient(0, 2, 1)
        swapped = {first: second, second: first}
        message = self.broken(lambda rank, actions: [swapped.get(action, action) for action in actions])
        assert "what it has started to receive next is" in message
