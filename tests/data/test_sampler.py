"""The order of samples: complete, seeded, and independent of topology and history."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.data.sampler import GlobalBatchSampler

SIZES = {"sample_count": st.integers(1, 60), "global_batch_size": st.integers(1, 17), "seed": st.integers(0, 2**32)}


def epoch_of(sampler: GlobalBatchSampler, epoch: int) -> list[int | None]:
    steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
    return list(chain.from_iterable(sampler.batch(step) for step in steps))


@given(**SIZES, epoch=st.integers(0, 3))
def test_an_epoch_has_every_sample_once_then_padding(sample_count, global_batch_size, seed, epoch):
    sampler = GlobalBatchSampler(sample_count, global_batch_size, seed)
    slots = epoch_of(sampler, epoch)
    assert set(slots[:sample_count]) == set(range(sample_count))
    assert slots[sample_count:] == [None] * (len(slots) - sample_count)
    assert len(slots) == sampler.steps_per_epoch * global_batch_size
    assert len(slots) - sample_count < global_batch_size


@given(**SIZES, steps=st.lists(st.integers(0, 40), max_size=8))
def test_a_step_does_not_depend_on_the_steps_before(sample_count, global_batch_size, seed, steps):
    sampler = GlobalBatchSampler(sample_count, global_batch_size, seed)
    for step in steps:
        assert sampler.batch(step) == GlobalBatchSampler(sample_count, global_batch_size, seed).batch(step)


def test_epochs_and_seeds_differ():
    orders = [tuple(epoch_of(GlobalBatchSampler(50, 5, seed), epoch)) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4


def test_unshuffled_is_the_datasets_order_in_every_epoch():
    sampler = GlobalBatchSampler(5, 2, seed=0, shuffle=False)
    assert epoch_of(sampler, 0) == epoch_of(sampler, 1) == [0, 1, 2, 3, 4, None]


@pytest.mark.parametrize(("samples", "batch", "k", "updates"), [(148, 2, 16, 5), (9, 2, 2, 3)])
def test_a_partial_window_is_an_update(samples, batch, k, updates):
    assert GlobalBatchSampler(samples, batch * k, seed=0).steps_per_epoch == updates


def test_the_last_window_holds_the_samples_that_are_left():
    last = GlobalBatchSampler(148, 2 * 16, seed=0).batch(4)
    assert sum(index is not None for index in last) == 148 - 4 * 32


def test_three_epochs_of_nine_samples_are_nine_updates():
    sampler = GlobalBatchSampler(9, 4, seed=0)
    seen = [index for step in range(9) for index in sampler.batch(step) if index is not None]
    assert sorted(seen) == sorted(list(range(9)) * 3)
    assert [None in sampler.batch(step) for step in range(9)] == [False, False, True] * 3


def test_resume_at_step_2748_with_k_4_skips_10992_micro_batches():
    k, micro_batch_size = 4, 1
    sampler = GlobalBatchSampler(20_000, k * micro_batch_size, seed=3)
    every_sample = epoch_of(sampler, 0)
    assert GlobalBatchSampler(20_000, k * micro_batch_size, seed=3).batch(2748) == every_sample[10992:10996]


def test_resume_after_20_of_64_repeats_and_misses_nothing():
    before = list(chain.from_iterable(GlobalBatchSampler(64, 4, seed=7).batch(step) for step in range(5)))
    after = list(chain.from_iterable(GlobalBatchSampler(64, 4, seed=7).batch(step) for step in range(5, 16)))
    assert before + after == epoch_of(GlobalBatchSampler(64, 4, seed=7), 0)
    assert set(before + after) == set(range(64))
