"""The messages between the computations of a pipeline's ranks."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from syncline.program.actions import (
    Action,
    BackwardWeight,
    Computation,
    Forward,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)
from syncline.schedules.placement import Placement
from syncline.strategy.topology import Topology

Receive = ReceiveActivation | ReceiveGradient

Message = tuple[type[Receive], int, int]
"""By what it is received, with the receiver's stage, and the micro-batch."""


def with_messages(
    topology: Topology, placement: Placement, rank: int, orders: Sequence[Sequence[Computation]]
) -> Iterator[Action]:
    """The computations of `rank`, and the messages between them.

    Messages are received in the order in which they are sent, and so before they are needed where their sender was in
    more of a hurry than their receiver is.
    """
    own = topology.position(rank)
    coming = _messages_to(own, placement, orders)
    received: set[Message] = set()

    def receive(kind: type[Receive], stage: int, micro_batch: int, source: int) -> Iterator[Action]:
        there = placement.position(source)
        if there == own or not 0 <= source <= placement.last_stage:
            return
        while (kind, stage, micro_batch) not in received:
            message = coming[kind, there].popleft()
            received.add(message)
            yield kind(*message[1:], topology.neighbour(rank, pp=there))

    def send(kind: type[SendActivation | SendGradient], stage: int, micro_batch: int, target: int) -> Iterator[Action]:
        there = placement.position(target)
        if there != own and 0 <= target <= placement.last_stage:
            yield kind(stage, micro_batch, topology.neighbour(rank, pp=there))

    for action in orders[own]:
        stage, index = action.stage, action.micro_batch
        if isinstance(action, Forward):
            yield from receive(ReceiveActivation, stage, index, stage - 1)
            yield action
            yield from send(SendActivation, stage, index, stage + 1)
        elif isinstance(action, BackwardWeight):
            yield action
        else:
            yield from receive(ReceiveGradient, stage, index, stage + 1)
            yield action
            yield from send(SendGradient, stage, index, stage - 1)


def _messages_to(
    position: int, placement: Placement, orders: Sequence[Sequence[Computation]]
) -> dict[tuple[type[Receive], int], deque[Message]]:
    """What is sent to `position`, by kind and sender, in order."""
    messages: defaultdict[tuple[type[Receive], int], deque[Message]] = defaultdict(deque)
    neighbours = {stage + way for stage in placement.stages_at(position) for way in (-1, 1)}
    senders = {placement.position(stage) for stage in neighbours & set(range(placement.stages))} - {position}
    for sender in senders:
        for action in orders[sender]:
            if isinstance(action, BackwardWeight):
                continue
            kind, way = (ReceiveActivation, 1) if isinstance(action, Forward) else (ReceiveGradient, -1)
            stage = action.stage + way
            if 0 <= stage <= placement.last_stage and placement.position(stage) == position:
                messages[kind, sender].append((kind, stage, action.micro_batch))
    return messages
