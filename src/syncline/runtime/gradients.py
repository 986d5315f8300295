"""Performs the actions in the life of a gradient, on the buckets of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

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
from syncline.program.factors import Factor
from syncline.program.program import Program
from syncline.runtime.buckets import GradientBucket, GradientMemory, ParameterBucket, Storage
from syncline.runtime.collectives import Collectives
from syncline.runtime.exchange import Pending
from syncline.runtime.triggers import GradientQueue

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
    ) -> None:
        """`value` is what a factor amounts to in the running step; waits happen within a `waiting` of their own."""
        self.memory = GradientMemory()
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
        self._queue = GradientQueue(lambda action: self.handlers[type(action)](action))
        for bucket, part in program.kept_storages(rank):
            self.buckets[bucket].allocate(part)
        for bucket in {a.bucket for a in program.ranks[rank] if type(a) in self.handlers and _is_inside(a)}:  # type: ignore[attr-defined]
            self._queue.watch(self.buckets[bucket])

    def begin_backward(self, inside: Sequence[Action]) -> None:
        """`inside` holds the actions that happen during the backward, those of other kinds included."""
        self._queue.arm([action for action in inside if type(action) in self.handlers], self.buckets)

    def end_backward(self) -> None:
        self._queue.finish()

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
        self._collectives.sum(gradient, action.group, f"the other copies of {action.what}")


def _is_inside(action: Action) -> bool:
    return getattr(action, "during", None) is not None
