"""One replica's micro-batches of each step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from syncline.data.batch import IGNORED_LABEL, MicroBatch
from syncline.data.packing import Sample, SampleDataset
from syncline.data.sampler import GlobalBatchSampler


@dataclass(frozen=True)
class MicroBatchLoader:
    """Deals the slots of each global batch out to replicas, micro-batches and rows.

    Row `row` of micro-batch `m` on replica `r` takes slot `(m * replicas + r) * micro_batch_size + row`. Padding stands
    in the last slots, so the replicas share it as evenly as rows allow. A padding row repeats the window's first sample
    with every label masked: it has the usual shape and contributes nothing.

    Every replica gets the same number of micro-batches of the same shape in every step, whatever the number of samples.
    """

    dataset: SampleDataset
    sampler: GlobalBatchSampler
    micro_batch_size: int
    micro_batches: int
    replica: int
    replicas: int
    device: torch.device

    def __post_init__(self) -> None:
        assert 0 <= self.replica < self.replicas
        assert self.sampler.sample_count == len(self.dataset)
        assert self.sampler.global_batch_size == self.replicas * self.micro_batches * self.micro_batch_size

    def step(self, step: int) -> list[MicroBatch]:
        """This replica's `micro_batches` micro-batches of optimizer step `step` (from 0)."""
        slots = self.sampler.batch(step)
        return [self._micro_batch(slots, micro_batch) for micro_batch in range(self.micro_batches)]

    def epoch(self) -> Iterator[list[MicroBatch]]:
        """The steps of the first epoch: each sample of the dataset once, over all replicas."""
        return (self.step(step) for step in range(self.sampler.steps_per_epoch))

    def _micro_batch(self, slots: list[int | None], micro_batch: int) -> MicroBatch:
        first = (micro_batch * self.replicas + self.replica) * self.micro_batch_size
        padding_source = slots[0]
        assert padding_source is not None, "a window has at least one sample"
        rows = [
            self.dataset[index] if index is not None else _masked(self.dataset[padding_source])
            for index in slots[first : first + self.micro_batch_size]
        ]
        input_ids, labels, position_ids = (
            _on_its_way(np.stack(column), self.device) for column in zip(*rows, strict=True)
        )
        return MicroBatch(input_ids, labels, position_ids).to(self.device)


def evaluation_loader(
    dataset: SampleDataset,
    micro_batch_size: int,
    micro_batches: int,
    replica: int,
    replicas: int,
    device: torch.device,
) -> MicroBatchLoader:
    """A loader whose `epoch()` counts each sample of `dataset` exactly once over all replicas, in the dataset's order.

    It yields windows of `micro_batches` micro-batches, equally many on every replica.
    """
    sampler = GlobalBatchSampler(len(dataset), replicas * micro_batches * micro_batch_size, seed=0, shuffle=False)
    return MicroBatchLoader(dataset, sampler, micro_batch_size, micro_batches, replica, replicas, device)


def _masked(sample: Sample) -> Sample:
    return sample._replace(labels=np.full_like(sample.labels, IGNORED_LABEL))


def _on_its_way(values: NDArray[np.int64], device: torch.device) -> Tensor:
    """On the host, in memory from which a GPU can copy without making the host wait."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor
