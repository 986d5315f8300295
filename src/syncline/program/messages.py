"""How many messages must be able to wait between two ranks, so that no order of work can deadlock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from syncline.program.actions import (
    Action,
    PointToPoint,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)

SENDS = (SendActivation, SendGradient)
RECEIVES = (ReceiveActivation, ReceiveGradient)

LEAST = 2
"""With one message in flight 1F1B would lose time: a stage would have to deliver its next activation before its
neighbour, busy delivering a gradient, could take it.
"""


def messages_in_flight(ranks: Sequence[Sequence[Action]]) -> int:
    """The least bound, from `LEAST` on, on messages under way from one rank to another in one direction with which
    every send is received; `LEAST` when none helps.

    The bound is what a sender keeps alive. A rank with several stages may have to send the outputs of one stage while
    the receiver is still busy with the rest of its group of micro-batches at the stage before.
    """
    messages = [[action for action in actions if isinstance(action, SENDS + RECEIVES)] for actions in ranks]
    most = max((_most_to_one(actions) for actions in messages), default=0)
    return next((bound for bound in range(LEAST, most + 1) if _comes_to_an_end(messages, bound)), LEAST)


def _most_to_one(actions: Sequence[PointToPoint]) -> int:
    return max(Counter((a.peer, a.direction) for a in actions if isinstance(a, SENDS)).values(), default=0)


def _comes_to_an_end(messages: Sequence[Sequence[PointToPoint]], bound: int) -> bool:
    """Whether all ranks get through their messages when at most `bound` wait in each channel."""
    under_way: Counter[tuple[int, int, str]] = Counter()
    positions = [0] * len(messages)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(messages):
            before = positions[rank]
            for action in actions[before:]:
                if isinstance(action, RECEIVES):
                    channel, change = (action.peer, rank, action.direction), -1
                else:
                    channel, change = (rank, action.peer, action.direction), 1
                if not 0 <= under_way[channel] + change <= bound:
                    break
                under_way[channel] += change
                positions[rank] += 1
            moved |= positions[rank] != before
    return all(position == len(actions) for position, actions in zip(positions, messages, strict=True))
