"""Which samples each optimizer step sees."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass
class GlobalBatchSampler:
    """The samples of every step: a function of the seed, the step and the global batch size alone.

    Neither the topology nor the steps that ran before matter, so that every topology sees the same samples, and a
    resumed run continues where it stopped at no cost. Each epoch visits every sample once, in an order of its own.
    """

    sample_count: int
    global_batch_size: int
    seed: int
    shuffle: bool = True
    """False: every epoch is in the dataset's own order, as in evaluation."""
    _latest_order: tuple[int, NDArray[np.int64]] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.sample_count > 0
        assert self.global_batch_size > 0

    @property
    def steps_per_epoch(self) -> int:
        """A partial last window counts: it is an update over the samples that are left."""
        return -(-self.sample_count // self.global_batch_size)

    def batch(self, step: int) -> list[int | None]:
        """The `global_batch_size` slots of optimizer step `step` (from 0): sample indices, then None for padding.

        Only the last step of an epoch has padding.
        """
        epoch, window = divmod(step, self.steps_per_epoch)
        start = window * self.global_batch_size
        indices = [int(index) for index in self._order(epoch)[start : start + self.global_batch_size]]
        return [*indices, *[None] * (self.global_batch_size - len(indices))]

    def _order(self, epoch: int) -> range | NDArray[np.int64]:
        if not self.shuffle:
            return range(self.sample_count)
        if self._latest_order is None or self._latest_order[0] != epoch:
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self._latest_order = (epoch, generator.permutation(self.sample_count))
        return self._latest_order[1]
