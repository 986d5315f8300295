"""On which communicator each action travels: what is on one of them never waits for what is on another.

The interpreter proves programs under this division, and the runtime makes its process groups by it.
"""

from __future__ import annotations

from syncline.program.actions import (
    Action,
    GatherParameters,
    PointToPoint,
    ReduceGradients,
    SendActivation,
    SendGradient,
)

SHARED, REDUCTIONS, PARAMETERS = "shared", "reductions", "parameters"
"""Communicators over the same ranks."""

MessageCommunicator = tuple[int, int, str]
"""Sender, receiver, and whether activations or gradients travel."""


def collective_communicator(action: Action) -> str:
    """Which of a group's communicators a collective is on: reductions to owners, gathers, and all others."""
    if isinstance(action, GatherParameters):
        return PARAMETERS
    return REDUCTIONS if isinstance(action, ReduceGradients) and action.kind != "all_reduce" else SHARED


def message_communicator(rank: int, action: PointToPoint) -> MessageCommunicator:
    """Each pair of neighbours has a communicator for each direction of travel, and one for activations, one for
    gradients. NCCL runs what is on one communicator in order, and a send waits for its receive: on a communicator of
    the whole pipeline, a rank's send to the next rank would wait behind its receive from the one before.
    """
    sends = isinstance(action, (SendActivation, SendGradient))
    return (rank, action.peer, action.direction) if sends else (action.peer, rank, action.direction)
