"""Performs the actions in the life of a gradient, on the buckets of one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor

from syncline.modeling.kernels.linear import DeferredGradients, WeightGradients
from syncline.program.actions import (
    AccumulateShard,
    Action,
    AllocateGradients,
    FreeGradients,
    ReduceGradients,
    ReduceReplicated,
    ScaleGradients,
    WaitReduce,
    ZeroGradients,
)
from syncline.program.layout import Bucket
from syncline.program.program import Program
from syncline.program.scales import Factor
from syncline.runtime.backward_hooks import GradientQueue
from syncline.runtime.buckets import GradientBucket, ParameterBucket, Storage, StorageCount
from syncline.runtime.communication.collectives import Collectives
from syncline.runtime.communication.exchange import Pending

Handler = Callable[..., None]


class Gradients:
    """The gradient buckets of one rank, and the reductions under way."""

    def __init__(
        self,
        rank: int,
        program: Program,
        parameters: Mapping[int, ParameterBucket],
        dtype: torch.dtype,
        collectives: Collectives,
        value: Callable[[Factor], float],
        waiting: Callable[[], AbstractContextManager[None]],
        perform: Callable[[Action], None],
    ) -> None:
        """`value` is what a factor amounts to in the running step; waits happen within a `waiting` of their own;
        `perform` performs an action inside a computation, by the handler that is here.
        """
        self.memory = StorageCount()
        self._collectives = collectives
        self._value = value
        self._waiting = waiting
        self._reductions: dict[int, Pending] = {}
        self._to_owners: Pending | None = None
        shards = program.shards_of(rank)
        self.buckets = {
            bucket.id: GradientBucket(
                bucket,
                parameters[bucket.id].parameters,
                dtype,
                self.memory,
                program.owned(rank, bucket.id),
                keeps_shard=bucket.id in shards,
            )
            for bucket in program.buckets(rank)
        }
        self._bucket_of = {id(p): key for key, bucket in self.buckets.items() for p in bucket.parameters}
        self.handlers: dict[type[Action], Handler] = {
            AllocateGradients: lambda action: self.buckets[action.bucket].allocate(action.part),
            ReduceGradients: self._reduce,
            WaitReduce: self._wait,
            AccumulateShard: lambda action: self.buckets[action.bucket].accumulate_shard(),
            ScaleGradients: self._scale,
            ReduceReplicated: self._sum_copies,
            ZeroGradients: lambda action: self.buckets[action.bucket].zero(action.part),
            FreeGradients: lambda action: self.buckets[action.bucket].free(action.part),
        }
        self.of_weights = WeightGradients(self.main_gradient)
        self._queue = GradientQueue(perform)
        for bucket, part in program.kept_storages(rank):
            self.buckets[bucket].allocate(part)
        for bucket in {a.bucket for a in program.ranks[rank] if type(a) in self.handlers and _is_inside(a)}:  # type: ignore[attr-defined]
            self._queue.watch(self.buckets[bucket])

    @contextmanager
    def added_by(self, inside: Sequence[Action]) -> Iterator[None]:
        """Around a backward; `inside` holds the actions that happen during it, those of other kinds included."""
        self._queue.arm(self._own(inside), {id: len(bucket.parameters) for id, bucket in self.buckets.items()})
        yield
        self._queue.finish()

    @contextmanager
    def deferring(self, stage: int) -> Iterator[DeferredGradients]:
        """Around the first half of a backward of `stage`: nothing is added to buckets, all of it is in the list."""
        buckets = [bucket for bucket in self.buckets.values() if bucket.bucket.stage == stage]
        for bucket in buckets:
            bucket.set_apart()
        with self.of_weights.deferring() as deferred:
            yield deferred
        for bucket in buckets:
            deferred += [(parameter, partial(_add, gradient)) for parameter, gradient in bucket.take_apart()]
        # Bucket by bucket, as a whole backward fills them: so the second half can reduce one while it fills the next.
        deferred.sort(key=lambda each: self._bucket_of_weight(each[0]).last_gradient, reverse=True)

    @torch.no_grad()
    def add(self, deferred: DeferredGradients, inside: Sequence[Action]) -> None:
        """Add what the first half of a backward has put off, and drop it piece by piece; `inside` as above."""
        self._queue.arm(self._own(inside), Counter(self._bucket_of[id(weight)] for weight, _ in deferred))
        deferred.reverse()
        while deferred:
            weight, add = deferred.pop()
            add(self.main_gradient(weight))
            del add
            self._queue.count(self._bucket_of[id(weight)])
        self._queue.finish()

    def _bucket_of_weight(self, weight: Tensor) -> Bucket:
        return self.buckets[self._bucket_of[id(weight)]].bucket

    def _own(self, inside: Sequence[Action]) -> list[Action]:
        return [action for action in inside if type(action) in self.handlers]

    def main_gradient(self, parameter: Tensor) -> Tensor:
        """Where the parameter's gradient accumulates; a gradient is about to be added."""
        self._queue.allocate_now(self._bucket_of[id(parameter)])
        assert parameter.grad is not None
        return parameter.grad

    def _reduce(self, action: ReduceGradients) -> None:
        bucket = self.buckets[action.bucket]
        assert bucket.state is Storage.LIVE
        bucket.state = Storage.REDUCING
        to_owners = action.kind != "all_reduce"
        if to_owners and self._to_owners is not None:
            # Each needs memory for what it receives, and more than one at a time would not travel faster. The result of
            # the last one stays where it is until its `WaitReduce`.
            with self._waiting():
                self._to_owners.wait()
        reduction = self._reductions[action.bucket] = self._collectives.reduce(bucket, action)
        if to_owners:
            self._to_owners = reduction

    def _wait(self, action: WaitReduce) -> None:
        with self._waiting():
            self._reductions.pop(action.bucket).wait()
        self.buckets[action.bucket].state = Storage.LIVE

    def _scale(self, action: ScaleGradients) -> None:
        self.buckets[action.bucket].consumed.mul_(self._value(action.scale))

    def _sum_copies(self, action: ReduceReplicated) -> None:
        gradient = self.buckets[action.bucket].consumed
        copies = [b for b in self.buckets.values() if b.bucket.tie == action.what and b.bucket.id != action.bucket]
        for copy in copies:
            gradient.add_(copy.consumed)
        self._collectives.sum(gradient, action.group, f"the other copies of {action.what}")
        for copy in copies:
            copy.consumed.copy_(gradient)


def _add(gradient: Tensor, main: Tensor) -> None:
    main.add_(gradient)


def _is_inside(action: Action) -> bool:
    return getattr(action, "during", None) is not None
