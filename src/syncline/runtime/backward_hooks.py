"""What makes an action happen inside a forward or a backward: autograd's hooks, and the use of parameters.

Gradients and parameters have a queue each, in the order of the program. An event lets the actions of its queue happen
up to the one that it is meant for, so that all members of a group issue the same sequence even when some parameters get
no gradient, or are not used, on some ranks; what no event has come for happens when the computation is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from weakref import ref

from torch import Tensor, nn

from syncline.program.actions import (
    Action,
    AllocateGradients,
    FreeParameters,
    Part,
    ReduceGradients,
    WaitGather,
    bucket_of,
)
from syncline.runtime.buckets import GradientBucket

Perform = Callable[[Action], None]


class Event(Enum):
    """What an action inside a backward waits for."""

    FIRST_GRADIENT = "first gradient"
    LAST_GRADIENT = "last gradient"


@dataclass(frozen=True)
class _Queued:
    action: Action
    event: Event | None
    """None: the next event of an action behind it."""
    bucket: int


class GradientQueue:
    """What moves gradients inside the backward that is running now.

    The first gradient of a bucket allocates it, the last one starts its reduction. What stands between the events
    (waits, frees, further reductions) happens with the next event behind it: as late as the program allows.
    """

    def __init__(self, perform: Perform) -> None:
        self._perform = perform
        self._queue: list[_Queued] = []
        self._missing: dict[int, int] = {}

    def watch(self, bucket: GradientBucket) -> None:
        """Register the hooks of one bucket's parameters, once and for all."""
        for parameter in bucket.parameters:
            self._watch_parameter(parameter, bucket)

    def arm(self, actions: Sequence[Action], gradients: Mapping[int, int]) -> None:
        """Before a backward: what may happen inside it, in program order; and by bucket how many gradients come."""
        assert not self._queue
        self._missing = {}
        for action in actions:
            bucket = bucket_of(action)
            assert bucket is not None
            event = None
            if isinstance(action, AllocateGradients) and action.part is Part.BUCKET:
                event = Event.FIRST_GRADIENT
            elif isinstance(action, ReduceGradients) and bucket not in self._missing:
                self._missing[bucket] = gradients.get(bucket, 0)
                event = Event.LAST_GRADIENT
            self._queue.append(_Queued(action, event, bucket))

    def finish(self) -> None:
        """After the backward: what has not happened inside it happens now."""
        self._perform_up_to(len(self._queue) - 1)
        self._missing = {}

    def allocate_now(self, bucket: int) -> None:
        """A gradient is about to be added to the bucket: if that is the first one, the bucket gets its storage."""
        for position, queued in enumerate(self._queue):
            if queued.event is Event.FIRST_GRADIENT and queued.bucket == bucket:
                ready = next(i for i, each in enumerate(self._queue) if each.event is not None)
                self._perform_up_to(ready - 1)
                # If buckets fill in another order here, the storage cannot wait, the collectives can.
                self._perform(self._queue.pop(position - ready).action)
                return

    def _watch_parameter(self, parameter: nn.Parameter, bucket: GradientBucket) -> None:
        # What a parameter's hook after accumulation refers to is never collected if it refers to the parameter in turn.
        queue, id = ref(self), bucket.bucket.id

        def before_accumulation(gradient: Tensor) -> None:
            # `.grad` must be a view of the bucket before autograd adds to it.
            if (found := queue()) is not None:
                found.allocate_now(id)

        def after_accumulation(parameter: nn.Parameter) -> None:
            if (found := queue()) is not None:
                found.count(id)

        parameter.register_hook(before_accumulation)
        parameter.register_post_accumulate_grad_hook(after_accumulation)

    def count(self, bucket: int) -> None:
        """One more gradient of the bucket has been added."""
        if bucket in self._missing:
            self._missing[bucket] -= 1
            self._start_ready()

    def _start_ready(self) -> None:
        """Start the reductions of full buckets, up to the first that is not full yet."""
        last = -1
        for position, queued in enumerate(self._queue):
            if queued.event is Event.LAST_GRADIENT:
                if self._missing[queued.bucket] > 0:
                    break
                last = position
        self._perform_up_to(last)

    def _perform_up_to(self, position: int) -> None:
        """Storage in which nothing of this is done is left for its first gradient."""
        now, later = self._queue[: position + 1], self._queue[position + 1 :]
        needed = {queued.bucket for queued in now if queued.event is not Event.FIRST_GRADIENT}
        if position >= 0 and now[-1].event is Event.FIRST_GRADIENT:
            needed.add(now[-1].bucket)
        deferred = [q for q in now if q.event is Event.FIRST_GRADIENT and q.bucket not in needed] if later else []
        self._queue = [*deferred, *later]
        for queued in now:
            if queued not in deferred:
                self._perform(queued.action)


class ParameterQueue:
    """What moves parameters inside the computation that is running now.

    The first use of a bucket waits for its gather, and for those before it; the gathers and frees behind it follow at
    once. A bucket that is to be freed before it was used, because the model uses buckets in another order here, is
    freed when the computation is over.
    """

    def __init__(self, perform: Perform) -> None:
        self._perform_now = perform
        self._queue: list[Action] = []
        self._deferred: list[Action] = []
        self._used: set[int] = set()

    def arm(self, actions: Sequence[Action]) -> None:
        """Before a computation: what may happen inside it, in program order."""
        assert not self._queue
        self._queue = list(actions)
        self._used = set()
        self._follow()

    def use(self, bucket: int) -> None:
        """The computation is about to use parameters of the bucket."""
        self._used.add(bucket)
        for position, action in enumerate(self._queue):
            if isinstance(action, WaitGather) and action.bucket == bucket:
                now, self._queue = self._queue[: position + 1], self._queue[position + 1 :]
                for each in now:
                    self._perform(each)
                self._follow()
                return

    def finish(self) -> None:
        """After the computation: what has not happened inside it happens now."""
        rest, self._queue, self._deferred = [*self._queue, *self._deferred], [], []
        for action in rest:
            self._perform_now(action)

    def _follow(self) -> None:
        while self._queue and not isinstance(self._queue[0], WaitGather):
            self._perform(self._queue.pop(0))

    def _perform(self, action: Action) -> None:
        if isinstance(action, FreeParameters) and action.bucket not in self._used:
            self._deferred.append(action)
        else:
            self._perform_now(action)
