"""The loss scale follows what the steps decide, and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.runtime.optimization.loss_scale import GROWTH_INTERVAL, LossScale


def after(scale: float, *decisions: bool) -> LossScale:
    followed = LossScale(scale)
    for finite in decisions:
        followed.update(finite=finite)
    return followed


def test_an_overflow_halves_the_scale():
    assert after(32768.0, False).value == 16384.0
    assert after(32768.0, False, False, False).value == 4096.0


def test_the_scale_never_falls_below_one():
    assert after(3.0, False, False, False, False).value == 1.0
    assert after(1.0, False).value == 1.0


def test_it_doubles_after_many_steps_without_an_overflow():
    assert after(8.0, *[True] * (GROWTH_INTERVAL - 1)).value == 8.0
    assert after(8.0, *[True] * GROWTH_INTERVAL).value == 16.0
    assert after(8.0, *[True] * 2 * GROWTH_INTERVAL).value == 32.0


def test_an_overflow_begins_the_count_anew():
    almost = [True] * (GROWTH_INTERVAL - 1)
    assert after(8.0, *almost, False, *almost).value == 4.0
    assert after(8.0, *almost, False, *almost, True).value == 8.0


@pytest.mark.parametrize("interval", [GROWTH_INTERVAL])
def test_the_constants_are_those_of_torchs_scaler(interval):
    scaler = torch.amp.GradScaler("cpu")
    assert scaler.get_growth_interval() == interval
    assert after(1024.0, False).value == 1024.0 * scaler.get_backoff_factor()
    assert after(1024.0, *[True] * interval).value == 1024.0 * scaler.get_growth_factor()


@given(st.floats(1.0, 2.0**20), st.lists(st.booleans(), max_size=30))
def test_ranks_that_follow_the_same_decisions_have_the_same_scale(scale, decisions):
    assert after(scale, *decisions) == after(scale, *decisions)
    assert after(scale, *decisions).value == max(scale * 0.5 ** decisions.count(False), 1.0)
