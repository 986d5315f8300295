"""Performs the actions in the life of divided parameters, on the buckets of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from syncline.modeling.access.use import ParameterUse, storage_of
from syncline.modeling.pipeline.stage import Stage
from syncline.program.actions import Action, Backward, BackwardInput, FreeParameters, GatherParameters, WaitGather
from syncline.program.program import Program
from syncline.runtime.backward_hooks import ParameterQueue
from syncline.runtime.buckets import ParameterBucket, Presence, StorageCount
from syncline.runtime.communication.collectives import Collectives
from syncline.runtime.communication.exchange import Pending

ACTIONS = (GatherParameters, WaitGather, FreeParameters)


class Parameters:
    """The parameter buckets of one rank, and the gathers under way."""

    def __init__(
        self,
        rank: int,
        program: Program,
        stages: Mapping[int, Stage],
        collectives: Collectives,
        waiting: Callable[[], AbstractContextManager[None]],
        perform: Callable[[Action], None],
    ) -> None:
        """Waits happen within a `waiting` of their own; `perform` performs an action inside a computation, by the
        handler that is here.
        """
        self._collectives = collectives
        self._waiting = waiting
        self._gathers: dict[int, Pending] = {}
        self.memory = StorageCount()
        """Gathered parameters that can be freed again."""
        actions = [action for action in program.ranks[rank] if isinstance(action, ACTIONS)]
        self._regather = {action.bucket: action for action in actions if isinstance(action, GatherParameters)}
        freed = {action.bucket for action in actions if isinstance(action, FreeParameters)}
        names = {name: p for stage in stages.values() for name, p in stage.parameters_by_name().items()}
        self.buckets = {
            bucket.id: ParameterBucket(
                bucket, names, program.owned(rank, bucket.id), self.memory, divided=bucket.id in freed
            )
            for bucket in program.parameter_buckets(rank)
        }
        self.handlers: dict[type[Action], Callable[..., None]] = {
            GatherParameters: self._gather,
            WaitGather: self._wait,
            FreeParameters: self._free,
        }
        self._queue = ParameterQueue(perform)
        in_backward = any(isinstance(getattr(action, "during", None), (Backward, BackwardInput)) for action in actions)
        bucket_of = {storage_of(bucket.flat): key for key, bucket in self.buckets.items()}
        self._noticing_uses: AbstractContextManager[Any] = (
            ParameterUse(stages.values(), bucket_of, self._use, in_backward=in_backward) if actions else nullcontext()
        )

    @contextmanager
    def used_by(self, inside: Sequence[Action]) -> Iterator[None]:
        """Around a computation; `inside` holds the actions that happen during it, those of other kinds included."""
        awaited = [action for action in inside if isinstance(action, ACTIONS)]
        self._queue.arm(awaited)
        # Behind `at_rest` parameters are on their way that the program does not wait for here.
        with self._noticing_uses if awaited or self._gathers else nullcontext():
            yield
        self._queue.finish()

    def settle(self) -> None:
        """Wait for everything that is under way."""
        for bucket in list(self._gathers):
            self._wait(WaitGather(bucket))

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """As they are between two steps, in the midst of one: nothing under way, what can be freed is. All ranks of a
        sharding group do it together.
        """
        self.settle()
        whole = [key for key, bucket in self.buckets.items() if bucket.divided and bucket.presence is Presence.WHOLE]
        for bucket in whole:
            self.buckets[bucket].free()
        yield
        for bucket in whole:
            self._gather(self._regather[bucket])

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Every parameter is there and up to date. All ranks of a sharding group do it together."""
        with self.at_rest():
            divided = [key for key, bucket in self.buckets.items() if bucket.divided]
            for bucket in divided:
                self._gather(self._regather[bucket])
            self.settle()
            yield
            for bucket in divided:
                self.buckets[bucket].free()

    def _use(self, bucket: int) -> None:
        self._queue.use(bucket)
        if self.buckets[bucket].presence is Presence.GATHERING:
            self._wait(WaitGather(bucket))
        if self.buckets[bucket].presence is Presence.OWNED:
            names = ", ".join(slot.name for slot in self.buckets[bucket].bucket.slots[:3])
            raise RuntimeError(
                f"the parameters of bucket {bucket} ({names}, ...) are used when they have been freed or not been "
                "gathered yet: this model uses its layers in an order that changes. Write sharding: stage2, which "
                "keeps parameters whole."
            )

    def _gather(self, action: GatherParameters) -> None:
        bucket = self.buckets[action.bucket]
        if bucket.divided:
            bucket.restore()
        assert bucket.presence is not Presence.GATHERING
        bucket.presence = Presence.GATHERING
        self._gathers[action.bucket] = self._collectives.gather(bucket, action)

    def _free(self, action: FreeParameters) -> None:
        # What is whole in the program may be on its way again: `at_rest` has freed it in between.
        self._wait(WaitGather(action.bucket))
        self.buckets[action.bucket].free()

    def _wait(self, action: WaitGather) -> None:
        # None: the first step of a run begins with whole parameters, and so does one behind `settle`.
        gather = self._gathers.pop(action.bucket, None)
        if gather is not None:
            with self._waiting():
                gather.wait()
            self.buckets[action.bucket].presence = Presence.WHOLE
        assert self.buckets[action.bucket].presence is Presence.WHOLE
