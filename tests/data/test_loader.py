"""Micro-batches: the same samples for every topology, constant shapes, padding that counts for nothing."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.data.batch import IGNORED_LABEL, MicroBatch
from syncline.data.loader import MicroBatchLoader, evaluation_loader
from syncline.data.random_tokens import RandomTokenDataset
from syncline.data.sampler import GlobalBatchSampler

CPU = torch.device("cpu")
LENGTH = 6


def dataset_of(sample_count: int) -> RandomTokenDataset:
    return RandomTokenDataset(sample_count, LENGTH, vocabulary_size=1000, seed=0)


def loaders(sample_count: int, micro_batch_size: int, micro_batches: int, replicas: int) -> list[MicroBatchLoader]:
    dataset = dataset_of(sample_count)
    sampler = GlobalBatchSampler(sample_count, micro_batch_size * micro_batches * replicas, seed=5)
    return [
        MicroBatchLoader(dataset, sampler, micro_batch_size, micro_batches, replica, replicas, CPU)
        for replica in range(replicas)
    ]


def counted_rows(micro_batches: list[MicroBatch]) -> list[tuple[int, ...]]:
    """The rows that carry loss, as their tokens."""
    rows = [row for batch in micro_batches for row in zip(batch.input_ids, batch.labels, strict=True)]
    return [tuple(inputs.tolist()) for inputs, labels in rows if (labels != IGNORED_LABEL).any()]


FACTORISATIONS = [(1, 1, 24), (24, 1, 1), (1, 24, 1), (2, 3, 4), (4, 3, 2), (3, 2, 4), (2, 12, 1), (6, 1, 4)]


@pytest.mark.parametrize(("micro_batch_size", "micro_batches", "replicas"), FACTORISATIONS)
def test_every_factorisation_of_a_global_batch_sees_the_same_samples(micro_batch_size, micro_batches, replicas):
    group = loaders(100, micro_batch_size, micro_batches, replicas)
    (reference,) = loaders(100, 24, 1, 1)
    for step in range(12):
        rows = [row for loader in group for row in counted_rows(loader.step(step))]
        assert sorted(rows) == sorted(counted_rows(reference.step(step)))


def test_the_slot_of_each_row_is_the_documented_one():
    group = loaders(48, 2, 3, 4)
    for loader in group:
        slots = [index for index in loader.sampler.batch(1) if index is not None]
        for m, micro_batch in enumerate(loader.step(1)):
            for row in range(2):
                sample = loader.dataset[slots[(m * 4 + loader.replica) * 2 + row]]
                assert micro_batch.input_ids[row].tolist() == sample.input_ids.tolist()
                assert micro_batch.labels[row].tolist() == sample.labels.tolist()
                assert micro_batch.position_ids[row].tolist() == sample.position_ids.tolist()


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5))
def test_an_epoch_counts_each_sample_once_in_constant_shapes(sample_count, micro_batch_size, micro_batches, replicas):
    seen: Counter[tuple[int, ...]] = Counter()
    for loader in loaders(sample_count, micro_batch_size, micro_batches, replicas):
        windows = list(loader.epoch())
        assert len(windows) == loader.sampler.steps_per_epoch
        for window in windows:
            assert len(window) == micro_batches
            seen.update(counted_rows(window))
            for batch in window:
                tensors = (batch.input_ids, batch.labels, batch.position_ids)
                assert {(tensor.shape, tensor.dtype) for tensor in tensors} == {
                    ((micro_batch_size, LENGTH), torch.int64)
                }
    assert seen == Counter(tuple(dataset_of(sample_count)[index].input_ids.tolist()) for index in range(sample_count))


def test_padding_is_a_masked_copy_of_the_windows_first_sample():
    first, second = (loader.step(0)[0] for loader in loaders(1, 2, 1, 2))
    assert first.valid_tokens == LENGTH
    assert second.valid_tokens == 0
    for batch in (first, second):
        assert torch.equal(batch.input_ids[1], first.input_ids[0])
        assert (batch.labels[1] == IGNORED_LABEL).all()


def test_valid_tokens_of_148_samples_in_5_updates():
    (loader,) = loaders(148, 2, 16, 1)
    per_update = [sum(batch.valid_tokens for batch in window) for window in loader.epoch()]
    assert per_update == [32 * LENGTH] * 4 + [20 * LENGTH]


def test_evaluation_of_24_samples_on_5_replicas_counts_each_once():
    dataset = dataset_of(24)
    windows = [list(evaluation_loader(dataset, 2, 1, replica, 5, CPU).epoch()) for replica in range(5)]
    assert {len(replica) for replica in windows} == {3}
    rows = [row for replica in windows for window in replica for row in counted_rows(window)]
    assert sorted(rows) == sorted(tuple(dataset[index].input_ids.tolist()) for index in range(24))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies to a GPU")
def test_micro_batches_arrive_on_the_gpu():
    cpu, gpu = (evaluation_loader(dataset_of(5), 2, 3, 0, 1, torch.device(name)) for name in ("cpu", "cuda"))
    for expected, batch in zip(cpu.step(0), gpu.step(0), strict=True):
        assert batch.input_ids.device.type == "cuda"
        assert torch.equal(batch.input_ids.cpu(), expected.input_ids)
        assert torch.equal(batch.labels.cpu(), expected.labels)
