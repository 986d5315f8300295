"""How many messages must be able to wait between two ranks, so that no order of work can deadlock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from syncline.program.actions import Action, PointToPoint
from syncline.program.interpreter import SENDS, ChannelKind, Meaning, interpret

LEAST = 2
"""With one message in flight 1F1B would lose time: a stage would have to deliver its next activation before its
neighbour, busy delivering a gradient, could take it.
"""


def messages_in_flight(pipeline: Mapping[int, Sequence[Action]]) -> int:
    """The least bound, from `LEAST` on, on messages under way from one rank to another in one direction with which
    every send is received, on channels of either kind; `LEAST` when none helps. `pipeline` has the actions of the ranks
    of one pipeline.

    The bound is what a sender keeps alive. A rank with several stages may have to send the outputs of one stage while
    the receiver is still busy with the rest of its group of micro-batches at the stage before.
    """
    messages = {
        rank: [action for action in actions if isinstance(action, PointToPoint)] for rank, actions in pipeline.items()
    }
    most = max(map(_most_to_one, messages.values()))
    return next((bound for bound in range(LEAST, most + 1) if _comes_to_an_end(messages, bound)), LEAST)


def _most_to_one(actions: Sequence[PointToPoint]) -> int:
    return max(Counter((a.peer, a.direction) for a in actions if isinstance(a, SENDS)).values(), default=0)


def _comes_to_an_end(messages: Mapping[int, Sequence[PointToPoint]], bound: int) -> bool:
    """Whether all ranks get through their messages when at most `bound` wait in each channel."""
    return not any(
        interpret(messages, lambda rank, group: (), Meaning(), capacity=bound, channels=kind) for kind in ChannelKind
    )
