"""What makes an action happen inside a backward: autograd's own hooks on the parameters.

The first gradient of a bucket allocates it; the last one makes it ready for its reduction. Reductions start strictly in
the order of the program: a bucket that is ready early waits for those before it, so that all members of a group issue
the same sequence even when some parameters get no gradient on some ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from syncline.program.actions import Action, AllocateGradients, ReduceGradients
from syncline.runtime.buckets import GradientBucket

Perform = Callable[[Action], None]


class BackwardTriggers:
    """The actions that happen during the backward that is running now."""

    def __init__(self, perform: Perform) -> None:
        self._perform = perform
        self._allocations: dict[int, AllocateGradients] = {}
        self._reductions: list[ReduceGradients] = []
        self._missing: dict[int, int] = {}

    def watch(self, bucket: GradientBucket) -> None:
        """Register the hooks of one bucket's parameters, once and for all."""
        for parameter in bucket.parameters:
            self._watch_parameter(parameter, bucket)

    def arm(self, actions: Sequence[Action], buckets: dict[int, GradientBucket]) -> None:
        """Before a backward: what may happen inside it, in program order."""
        assert not self._allocations
        assert not self._reductions
        self._allocations = {a.bucket: a for a in actions if isinstance(a, AllocateGradients)}
        self._reductions = [a for a in actions if isinstance(a, ReduceGradients)]
        self._missing = {a.bucket: len(buckets[a.bucket].parameters) for a in self._reductions}

    def finish(self) -> None:
        """After the backward: what has not happened inside it happens now, in program order."""
        for bucket in list(self._allocations):
            self.allocate_now(bucket)
        while self._reductions:
            self._perform(self._reductions.pop(0))
        self._missing = {}

    def allocate_now(self, bucket: int) -> None:
        """A gradient is about to be added to the bucket: if that is the first one, the bucket gets its storage."""
        if bucket in self._allocations:
            self._perform(self._allocations.pop(bucket))

    def _watch_parameter(self, parameter: nn.Parameter, bucket: GradientBucket) -> None:
        id = bucket.bucket.id

        def before_accumulation(gradient: Tensor) -> None:
            # `.grad` must be a view of the bucket before autograd adds to it.
            self.allocate_now(id)

        def after_accumulation(parameter: nn.Parameter) -> None:
            if id in self._missing:
                self._missing[id] -= 1
                self._start_ready()

        parameter.register_hook(before_accumulation)
        parameter.register_post_accumulate_grad_hook(after_accumulation)

    def _start_ready(self) -> None:
        while self._reductions and self._missing[self._reductions[0].bucket] == 0:
            self._perform(self._reductions.pop(0))
