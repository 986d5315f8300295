"""Combinations of the options of a gradient's life on real processes: every gradient, parameter and byte.

A seeded sample that covers all pairs of choices, or with `--matrix` all combinations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from tools.combinations import AXES, BY_SLICES, SIDE_AXES, STAGE2, combinations, ranks_of, works

from syncline.program.actions import AccumulateShard, Action, OptimizerStep, ReduceGradients, WaitReduce
from syncline.program.scales import Factor
from tests.verification.combination_runs import Change, Combination, is_exact, name_of, run_all
from tests.verification.covering import filled_up, pairwise

pytestmark = pytest.mark.ranks

SAMPLE, SEED = 320, 7

FIXED_IN_A_CALL = ("topology", "sharding", "gradient_sync", "overlap", "average", "loss scale", "release", "dtype")
"""Of the matrix a call runs all combinations of the other axes."""


def is_run(choices: Mapping[str, Any]) -> bool:
    """Optimizers and clipping are left to exact runs."""
    plain = choices.get("optimizer", "adamw") == "adamw" and choices.get("clipping", "clipped") == "clipped"
    return works(choices) and (plain or is_exact(choices))


@cache
def sample() -> tuple[Combination, ...]:
    """All pairs of choices first, then at random, of few ranks more often."""
    options = {axis: tuple(choices) for axis, choices in {**AXES, **SIDE_AXES}.items()}
    few = [topology for topology in AXES["topology"] if 1 < ranks_of({"topology": topology}) <= 4]
    often = {**options, "topology": (*options["topology"], *few, *few)}
    return tuple(filled_up(pairwise(options, is_run), often, SAMPLE, SEED, is_run))


@dataclass(frozen=True)
class PartOfSample:
    """What runs in one call of the pool: on one topology, as every process group that is kept costs threads."""

    topology: str

    def __str__(self) -> str:
        return self.topology

    @property
    def combinations(self) -> list[Combination]:
        return [row for row in sample() if row["topology"] == self.topology]


@dataclass(frozen=True)
class PartOfMatrix:
    fixed: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(self.fixed)

    @property
    def combinations(self) -> list[Combination]:
        return list(combinations(**dict(zip(FIXED_IN_A_CALL, self.fixed, strict=True))))


def parts_of_sample() -> list[PartOfSample]:
    return [PartOfSample(topology) for topology in AXES["topology"]]


def parts_of_matrix(share: str) -> list[PartOfMatrix]:
    """Those of one share, such as 3/100: every hundredth part, counted from the third."""
    number, _, shares = share.partition("/")
    cases = product(*(AXES[axis] for axis in FIXED_IN_A_CALL))
    working = [case for case in cases if works(dict(zip(FIXED_IN_A_CALL, case, strict=True)))]
    return [PartOfMatrix(case) for case in working[int(number) - 1 :: int(shares or 1)]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "call" in metafunc.fixturenames:
        share = metafunc.config.getoption("matrix")
        metafunc.parametrize("call", parts_of_matrix(share) if share else parts_of_sample(), ids=str)


def test_combinations_train_as_one_process_does(pool, call):
    rows = call.combinations
    by_rank = pool.run(ranks_of(rows[0]), run_all, rows, timeout=600.0)
    failed = {
        f"rank {rank} with {name_of(row)}": wrong
        for rank, found in enumerate(by_rank)
        for row, wrong in zip(rows, found, strict=True)
        if wrong
    }
    assert not failed, "\n".join(f"{which}\n    " + "\n    ".join(wrong[:5]) for which, wrong in failed.items())


def test_every_combination_of_the_sample_is_in_one_part():
    called = [row for part in parts_of_sample() for row in part.combinations]
    assert len(called) == len(sample()) == SAMPLE
    assert all(row in called for row in sample())


# ---- What must be found out ------------------------------------------------------------------------------------------


def one_bucket_is_not_reduced(rank: int, actions: Sequence[Action]) -> Sequence[Action]:
    bucket = next(action.bucket for action in actions if isinstance(action, ReduceGradients))
    return [a for a in actions if not (isinstance(a, (ReduceGradients, WaitReduce)) and a.bucket == bucket)]


def one_micro_batch_is_not_in_the_shard(rank: int, actions: Sequence[Action]) -> Sequence[Action]:
    first = next(index for index, action in enumerate(actions) if isinstance(action, AccumulateShard))
    return [*actions[:first], *actions[first + 1 :]]


def updates_are_scaled_once_more(rank: int, actions: Sequence[Action]) -> Sequence[Action]:
    half = Factor.of(replicas=-1)
    return [replace(a, scale=a.scale * half) if isinstance(a, OptimizerStep) else a for a in actions]


WRONG: Sequence[tuple[Change, str, str]] = (
    (one_bucket_is_not_reduced, BY_SLICES, "last_micro_batch"),
    (one_micro_batch_is_not_in_the_shard, STAGE2, "every_micro_batch"),
    (updates_are_scaled_once_more, BY_SLICES, "last_micro_batch"),
)


@pytest.mark.parametrize(("change", "form", "moment"), WRONG, ids=[change.__name__ for change, *_ in WRONG])
def test_a_wrong_program_is_found_out(pool, change, form, moment):
    first_choices = {axis: next(iter(choices)) for axis, choices in AXES.items()}
    fixed = {"topology": "sharding=2", "sharding": form, "gradient_sync": moment, "k": "k=3"}
    rows = [{**first_choices, **fixed, "dtype": dtype, "tokens": "uneven"} for dtype in AXES["dtype"]]
    for found in pool.run(2, run_all, rows, change):
        assert all(wrong for wrong in found), found
    for found in pool.run(2, run_all, rows):
        assert not any(found), found
