"""Where a step's time goes, without ever making the device wait.

On the CPU an action has taken effect when it returns, so the host's clock is right. On CUDA, events are recorded
between phases and read when the step is reported, by which time they have passed.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from syncline.program.actions import Action


class Phase(str, Enum):
    """The parts of a step that are reported."""

    FORWARD_BACKWARD = "forward_backward"
    REDUCE_WAIT = "reduce_wait"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class ActionTime:
    """When one action ran: seconds since the step began."""

    position: int
    """In the rank's actions."""
    start: float
    end: float


class Clock(Protocol):
    """Marks the phases of one step."""

    @property
    def phase(self) -> Phase | None:
        """To what time belongs now."""

    def enter(self, phase: Phase | None) -> None:
        """From now on time belongs to `phase`; None ends the step."""

    def seconds(self) -> dict[Phase, float]:
        """Seconds spent in each phase of the finished step; may be called once the step's results are read."""


class HostClock:
    """For devices that compute while the host waits."""

    def __init__(self) -> None:
        self._spent = dict.fromkeys(Phase, 0.0)
        self.phase: Phase | None = None
        self._since = 0.0

    def enter(self, phase: Phase | None) -> None:
        if phase is self.phase:
            return
        now = time.perf_counter()
        if self.phase is not None:
            self._spent[self.phase] += now - self._since
        self.phase, self._since = phase, now

    def seconds(self) -> dict[Phase, float]:
        return dict(self._spent)


class EventClock:
    """For CUDA: events in the current stream."""

    def __init__(self) -> None:
        self._marks: list[tuple[Phase | None, torch.cuda.Event]] = []

    @property
    def phase(self) -> Phase | None:
        return self._marks[-1][0] if self._marks else None

    def enter(self, phase: Phase | None) -> None:
        if self._marks and self._marks[-1][0] is phase:
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((phase, event))

    def seconds(self) -> dict[Phase, float]:
        spent = dict.fromkeys(Phase, 0.0)
        if self._marks:
            self._marks[-1][1].synchronize()
        for (phase, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if phase is not None:
                spent[phase] += start.elapsed_time(end) / 1000.0
        return spent


class ActionTimer:
    """When the actions of one program run, those inside computations too: by the host's clock, or on CUDA by events in
    the current stream, which are read once they have passed.
    """

    def __init__(self, actions: Sequence[Action], device: torch.device, before: ActionTimer | None = None) -> None:
        """Starts now. `before` is the timer of the program that ran before on this device: on CUDA the host does not
        know when the device begins, but how long after that one it did.
        """
        on_cuda = device.type == "cuda"
        self._mark: Callable[[], Any] = _event if on_cuda else time.perf_counter
        self._positions: defaultdict[Action, deque[int]] = defaultdict(deque)
        for position, action in enumerate(actions):
            self._positions[action].append(position)
        self._marks: list[tuple[int, Any, Any]] = []
        self._before = before if on_cuda else None
        if on_cuda and before is None:
            torch.cuda.synchronize(device)
        self._start, self._began = self._mark(), time.time()

    @contextmanager
    def measuring(self, action: Action) -> Iterator[None]:
        start = self._mark()
        yield
        # Equal actions come in the order in which they stand.
        self._marks.append((self._positions[action].popleft(), start, self._mark()))

    def times(self) -> list[ActionTime]:
        """In the order of the program. On CUDA the program must have been waited for."""
        marks = sorted(self._marks, key=lambda each: each[0])
        return [
            ActionTime(position, _seconds(self._start, start), _seconds(self._start, end))
            for position, start, end in marks
        ]

    def began(self) -> float:
        """When the program began, in seconds since the epoch by this host's clock. As for `times`."""
        if self._before is not None:
            self._began = self._before.began() + _seconds(self._before._start, self._start)
            self._before = None
        return self._began


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1000.0


@contextmanager
def waiting(clock: Clock | None) -> Iterator[None]:
    """Time within belongs to waiting for others, if a step is being timed."""
    phase = clock.phase if clock is not None else None
    if clock is None or phase is None:
        yield
        return
    clock.enter(Phase.REDUCE_WAIT)
    yield
    clock.enter(phase)


def clock_for(device: torch.device) -> Clock:
    return EventClock() if device.type == "cuda" else HostClock()
