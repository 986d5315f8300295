"""Runs all ranks of a program, without any device: what its actions mean is up to the reader.

The interpreter knows what every reader has to know: each rank performs its actions in order; a receive waits for its
message, a send for room; a collective is joined where it stands, and waited for where its wait stands. What actions do
(write a gradient, take time, hold memory) is the `Meaning`. Four read programs by it: the verifier's proof
(`program.verification`), the capacity of channels (`analysis.capacity`), time (`analysis.simulation`) and memory
(`analysis.memory`).

Channels are of two kinds. Gloo's are independent and buffered: a message leaves its sender, up to the program's bound
on messages in flight. NCCL runs the operations of one communicator in order, and a send waits for its receive; and
since a device runs what was launched first, collectives of all communicators of a rank are in one queue here: they end
only if all ranks have launched them in orders that agree.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from syncline.program.actions import (
    Action,
    ClipGradients,
    CountTokens,
    GatherParameters,
    PointToPoint,
    ReceiveActivation,
    ReceiveGradient,
    ReduceGradients,
    ReduceLoss,
    ReduceReplicated,
    SendActivation,
    SendGradient,
    StartReceivingActivation,
    StartReceivingGradient,
    WaitGather,
    WaitReduce,
    bucket_of,
)
from syncline.program.communicators import collective_communicator, message_communicator


class ChannelKind(Enum):
    """How what is on its way between ranks is held up."""

    GLOO = "Gloo"
    """Messages are buffered, communicators are independent."""
    NCCL = "NCCL"
    """A communicator runs its operations in order, a send waits for its receive, collectives of a rank are in one
    queue.
    """


Members = Callable[[int, str], tuple[int, ...]]
"""(rank, group name) -> the global ranks of that group."""
MessageCommunicator = Callable[[int, PointToPoint], Hashable]
"""(rank, action) -> on which communicator the message travels."""

SENDS = (SendActivation, SendGradient)
RECEIVES = (ReceiveActivation, ReceiveGradient)
STARTS_OF_RECEIVES = (StartReceivingActivation, StartReceivingGradient)
STARTS: dict[type[Action], type[Action]] = {ReduceGradients: WaitReduce, GatherParameters: WaitGather}
"""Collectives that are started, and what waits for them."""
BLOCKING = (CountTokens, ClipGradients, ReduceLoss, ReduceReplicated)
"""Collectives that are waited for where they stand."""
_WAITS = tuple(STARTS.values())


@dataclass
class Collective:
    """One collective, as far as its members have come."""

    members: tuple[int, ...]
    """Those that are interpreted."""
    joined: dict[int, tuple[Action, Any]] = field(default_factory=dict)
    """By rank, in the order in which they came: the action, and what the rank puts in."""
    is_done: bool = False

    @property
    def first(self) -> Action:
        """What the member that came first has issued."""
        return next(iter(self.joined.values()))[0]

    @property
    def has_all_members(self) -> bool:
        return len(self.joined) == len(self.members)


class Meaning:
    """What actions do. Every method is called once for an action, when nothing is left to wait for; by default they do
    nothing.
    """

    def perform(self, rank: int, position: int, action: Action) -> None:
        """An action that needs no other rank."""

    def send(self, rank: int, position: int, action: PointToPoint) -> Any:
        """What the message carries."""

    def start_receiving(self, rank: int, position: int, action: PointToPoint) -> None:
        """Room is made for the next message of a channel."""

    def receive(self, rank: int, position: int, action: PointToPoint, sent: PointToPoint, message: Any) -> None:
        """The next message of a channel has come: it was `sent` by that action, and carries what `send` returned."""

    def join(self, rank: int, position: int, action: Action, collective: Collective) -> Any:
        """The rank takes part in a collective, whose earlier members are in it: what it puts in."""

    def complete(self, rank: int, position: int, action: Action, collective: Collective | None) -> None:
        """All members have joined. `action` is the wait, or the collective itself where it is waited for at once; None:
        nothing that it could wait for has been started in this program.
        """


@dataclass(frozen=True)
class Stuck:
    """A rank that waits for ever."""

    rank: int
    position: int
    action: Action


def interpret(
    ranks: Mapping[int, Sequence[Action]],
    members: Members,
    meaning: Meaning,
    *,
    capacity: int | None,
    channels: ChannelKind = ChannelKind.GLOO,
    communicator: MessageCommunicator = message_communicator,
) -> list[Stuck]:
    """Perform the actions of all `ranks`, in any order that they allow; the ranks that do not come to their end.

    `ranks` may be some ranks of a program, such as one pipeline's: then collectives are joined by these alone.
    `capacity` bounds the messages on their way from one rank to another in one direction; None: as many as come.
    """
    network = _Gloo(capacity) if channels is ChannelKind.GLOO else _Nccl(capacity, communicator)
    return _Interpreter(ranks, members, meaning, network).run()


Channel = tuple[int, int, str]
"""Sender, receiver, direction."""


class _Gloo:
    """Buffered messages; a collective is done when all have joined it."""

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._messages: defaultdict[Channel, deque[tuple[PointToPoint, Any]]] = defaultdict(deque)

    def has_room(self, channel: Channel) -> bool:
        return self._capacity is None or len(self._messages[channel]) < self._capacity

    def send(self, channel: Channel, action: PointToPoint, message: Any) -> None:
        self._messages[channel].append((action, message))

    def start_receiving(self, channel: Channel, action: PointToPoint) -> None:
        pass

    def is_there(self, channel: Channel, action: PointToPoint) -> bool:
        """Whether the next message is there."""
        return bool(self._messages[channel])

    def take(self, channel: Channel) -> tuple[PointToPoint, Any]:
        return self._messages[channel].popleft()

    def launch(self, rank: int, collective: Collective) -> None:
        collective.is_done = collective.has_all_members


class _Nccl:
    """Every communicator has a queue on each of its ranks; what heads the queues of both or all ranks is done."""

    def __init__(self, capacity: int | None, communicator: MessageCommunicator) -> None:
        self._capacity = capacity
        self._communicator = communicator
        self._queues: defaultdict[tuple[int, Hashable], deque[tuple[Channel, bool]]] = defaultdict(deque)
        """By rank and communicator: the channel of each operation, and whether it sends."""
        self._unfinished: defaultdict[Channel, int] = defaultdict(int)
        """Sends whose receive has not met them."""
        self._messages: defaultdict[Channel, deque[tuple[PointToPoint, Any]]] = defaultdict(deque)
        self._met: defaultdict[Channel, int] = defaultdict(int)
        """Messages that have come and were not taken yet."""
        self._posted: defaultdict[Channel, int] = defaultdict(int)
        """Receives that were posted and not taken yet."""
        self._launched: defaultdict[int, deque[Collective]] = defaultdict(deque)

    def has_room(self, channel: Channel) -> bool:
        return self._capacity is None or self._unfinished[channel] < self._capacity

    def send(self, channel: Channel, action: PointToPoint, message: Any) -> None:
        self._messages[channel].append((action, message))
        self._unfinished[channel] += 1
        self._post(channel[0], action, channel, sends=True)

    def start_receiving(self, channel: Channel, action: PointToPoint) -> None:
        self._posted[channel] += 1
        self._post(channel[1], action, channel, sends=False)

    def is_there(self, channel: Channel, action: PointToPoint) -> bool:
        if not self._posted[channel]:
            self.start_receiving(channel, action)
        return self._met[channel] > 0

    def take(self, channel: Channel) -> tuple[PointToPoint, Any]:
        self._posted[channel] -= 1
        self._met[channel] -= 1
        return self._messages[channel].popleft()

    def _post(self, rank: int, action: PointToPoint, channel: Channel, *, sends: bool) -> None:
        communicator = self._communicator(rank, action)
        self._queues[rank, communicator].append((channel, sends))
        waiting = {(rank, communicator)}
        while waiting:
            one, communicator = waiting.pop()
            queue = self._queues[one, communicator]
            if not queue:
                continue
            found, sending = queue[0]
            other = found[1] if sending else found[0]
            opposite = self._queues[other, communicator]
            if opposite and opposite[0] == (found, not sending):
                queue.popleft()
                opposite.popleft()
                self._unfinished[found] -= 1
                self._met[found] += 1
                waiting |= {(one, communicator), (other, communicator)}

    def launch(self, rank: int, collective: Collective) -> None:
        self._launched[rank].append(collective)
        waiting = {rank}
        while waiting:
            queue = self._launched[waiting.pop()]
            if queue and self._is_next_everywhere(queue[0]):
                done = queue[0]
                done.is_done = True
                for member in done.members:
                    self._launched[member].popleft()
                waiting |= set(done.members)

    def _is_next_everywhere(self, collective: Collective) -> bool:
        if not collective.has_all_members:
            return False
        return all(self._launched[member][0] is collective for member in collective.members)


class _Interpreter:
    def __init__(
        self, ranks: Mapping[int, Sequence[Action]], members: Members, meaning: Meaning, network: _Gloo | _Nccl
    ) -> None:
        self._ranks = ranks
        self._members = members
        self._meaning = meaning
        self._network = network
        self._positions = dict.fromkeys(ranks, 0)
        self._collectives: dict[tuple[tuple[int, ...], str, int], Collective] = {}
        """By members, communicator, and place among the collectives of that communicator."""
        self._issued: defaultdict[tuple[int, tuple[int, ...], str], int] = defaultdict(int)
        self._started: dict[tuple[int, type[Action], int | None], Collective] = {}
        """By rank, kind of wait, and bucket."""
        self._blocked_in: dict[int, Collective] = {}

    def run(self) -> list[Stuck]:
        moved = True
        while moved:
            moved = False
            for rank in self._ranks:
                moved |= self._advance(rank)
        return [
            Stuck(rank, position, self._ranks[rank][position])
            for rank, position in self._positions.items()
            if position < len(self._ranks[rank])
        ]

    def _advance(self, rank: int) -> bool:
        actions, position = self._ranks[rank], self._positions[rank]
        before = position
        while position < len(actions) and self._perform(rank, position, actions[position]):
            position += 1
        self._positions[rank] = position
        return position != before

    def _perform(self, rank: int, position: int, action: Action) -> bool:
        """Whether the rank could perform it."""
        if isinstance(action, PointToPoint):
            return self._pass_message(rank, position, action)
        if isinstance(action, BLOCKING):
            if rank not in self._blocked_in:
                self._blocked_in[rank] = self._join(rank, position, action)
            if not self._blocked_in[rank].is_done:
                return False
            self._meaning.complete(rank, position, action, self._blocked_in.pop(rank))
        elif type(action) in STARTS:
            self._started[rank, STARTS[type(action)], bucket_of(action)] = self._join(rank, position, action)
        elif isinstance(action, _WAITS):
            key = (rank, type(action), bucket_of(action))
            if key in self._started and not self._started[key].is_done:
                return False
            self._meaning.complete(rank, position, action, self._started.pop(key, None))
        else:
            self._meaning.perform(rank, position, action)
        return True

    def _pass_message(self, rank: int, position: int, action: PointToPoint) -> bool:
        sends = isinstance(action, SENDS)
        ends = (rank, action.peer) if sends else (action.peer, rank)
        channel = (*ends, action.direction)
        if sends:
            if not self._network.has_room(channel):
                return False
            self._network.send(channel, action, self._meaning.send(rank, position, action))
        elif isinstance(action, STARTS_OF_RECEIVES):
            self._meaning.start_receiving(rank, position, action)
            self._network.start_receiving(channel, action)
        else:
            if not self._network.is_there(channel, action):
                return False
            self._meaning.receive(rank, position, action, *self._network.take(channel))
        return True

    def _join(self, rank: int, position: int, action: Action) -> Collective:
        group = self._members(rank, action.group)  # type: ignore[attr-defined]
        communicator = collective_communicator(action)
        index = self._issued[rank, group, communicator]
        self._issued[rank, group, communicator] += 1
        collective = self._collectives.get((group, communicator, index))
        if collective is None:
            collective = Collective(tuple(member for member in group if member in self._ranks))
            self._collectives[group, communicator, index] = collective
        contribution = self._meaning.join(rank, position, action, collective)
        collective.joined[rank] = (action, contribution)
        self._network.launch(rank, collective)
        return collective
