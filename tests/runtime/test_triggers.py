"""What happens inside a backward, and in which order."""

from __future__ import annotations

from functools import partial

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from syncline.program.actions import Action, AllocateGradients, Backward, ReduceGradients
from syncline.program.layout import Bucket, Slot
from syncline.runtime.buckets import GradientBucket, GradientMemory
from syncline.runtime.triggers import BackwardTriggers

BACKWARD = Backward(0, 0)


class Watched:
    """Three buckets of two parameters each, in which actions are recorded as they happen."""

    def __init__(self, *, persistent: bool = False) -> None:
        self.happened: list[str] = []
        self.parameters: dict[str, nn.Parameter] = {}
        self.buckets: dict[int, GradientBucket] = {}
        self.triggers = BackwardTriggers(self._perform)
        for id in range(3):
            names = [f"{id}.{index}" for index in range(2)]
            own = [self.parameters.setdefault(name, nn.Parameter(torch.ones(4))) for name in names]
            slots = tuple(Slot(name, (4,), 64 * index) for index, name in enumerate(names))
            bucket = GradientBucket(Bucket(id, 0, slots, 128, decay=True), own, torch.float32, GradientMemory())
            if persistent:
                bucket.allocate()
            self.buckets[id] = bucket
            for name, parameter in zip(names, own, strict=True):
                parameter.register_post_accumulate_grad_hook(partial(self._accumulated, name))
            self.triggers.watch(bucket)

    def _accumulated(self, name: str, parameter: nn.Parameter) -> None:
        self.happened.append(name)

    def _perform(self, action: Action) -> None:
        if isinstance(action, AllocateGradients):
            self.buckets[action.bucket].allocate()
            self.happened.append(f"allocate {action.bucket}")
        if isinstance(action, ReduceGradients):
            self.happened.append(f"reduce {action.bucket}")

    def backward(self, chain: list[str], actions: list[Action]) -> list[str]:
        """What happens in and after a backward in which the last of the chain gets its gradient first."""
        self.happened = []
        value = torch.ones(4, requires_grad=True)
        for name in chain:
            value = value * self.parameters[name]
        self.triggers.arm(actions, self.buckets)
        value.sum().backward()
        self.happened.append("end")
        self.triggers.finish()
        return self.happened


def reductions(*buckets: int) -> list[Action]:
    return [ReduceGradients(bucket, "dp", during=BACKWARD) for bucket in buckets]


def allocations(*buckets: int) -> list[Action]:
    return [AllocateGradients(bucket, during=BACKWARD) for bucket in buckets]


def reduced(happened: list[str]) -> list[str]:
    return [entry for entry in happened if entry.startswith("reduce")]


def test_a_reduction_starts_with_the_last_gradient_of_its_bucket():
    happened = Watched(persistent=True).backward(["2.0", "2.1", "1.0", "1.1", "0.0", "0.1"], reductions(0, 1, 2))
    assert happened == [
        *("0.1", "0.0", "reduce 0"),
        *("1.1", "1.0", "reduce 1"),
        *("2.1", "2.0", "reduce 2"),
        "end",
    ]


def test_a_bucket_that_is_full_early_waits_for_those_before_it():
    happened = Watched(persistent=True).backward(["0.0", "1.0", "1.1", "0.1", "2.1", "2.0"], reductions(0, 1, 2))
    assert happened == ["2.0", "2.1", "0.1", "1.1", "1.0", "0.0", "reduce 0", "reduce 1", "reduce 2", "end"]


@given(st.permutations([f"{bucket}.{index}" for bucket in range(3) for index in range(2)]), st.integers(0, 6))
def test_reductions_start_in_program_order_whatever_fills_first_or_never(order, used):
    watched = Watched(persistent=True)
    for program in ((0, 1, 2), (2, 0, 1), (1,)):
        happened = watched.backward([*order[:used]], reductions(*program))
        assert reduced(happened) == [f"reduce {bucket}" for bucket in program]


def test_a_parameter_without_a_gradient_holds_nothing_up_beyond_the_backward():
    """Bucket 0 is ready inside, 1 never, and 2 waits for 1."""
    happened = Watched(persistent=True).backward(["2.0", "2.1", "1.0", "0.0", "0.1"], reductions(0, 1, 2))
    assert happened == ["0.1", "0.0", "reduce 0", "1.0", "2.1", "2.0", "end", "reduce 1", "reduce 2"]


def test_a_parameter_used_twice_counts_once():
    happened = Watched(persistent=True).backward(["0.0", "0.1", "0.0"], reductions(0))
    assert sorted(happened[:2]) == ["0.0", "0.1"]
    assert happened[2:] == ["reduce 0", "end"]


def test_the_first_gradient_allocates_its_bucket_and_the_rest_happens_at_the_end():
    watched = Watched()
    happened = watched.backward(["1.1", "0.0", "1.0"], allocations(0, 1, 2))
    assert happened == ["allocate 1", "1.0", "allocate 0", "0.0", "1.1", "end", "allocate 2"]
    for name, parameter in watched.parameters.items():
        expected = 1.0 if name in ("1.0", "1.1", "0.0") else 0.0
        assert parameter.grad is not None
        assert (parameter.grad == expected).all()
        assert parameter.grad.untyped_storage().data_ptr() == watched.buckets[int(name[0])].flat.data_ptr()


def test_allocation_and_reduction_in_one_backward():
    happened = Watched().backward(["1.0", "1.1", "0.0", "0.1"], [*allocations(0, 1, 2), *reductions(0, 1, 2)])
    assert happened == [
        *("allocate 0", "0.1", "0.0", "reduce 0"),
        *("allocate 1", "1.1", "1.0", "reduce 1"),
        *("end", "allocate 2", "reduce 2"),
    ]


def test_a_backward_without_actions_triggers_nothing():
    watched = Watched(persistent=True)
    watched.backward(["0.0", "0.1"], reductions(0))
    assert watched.backward(["0.0", "0.1"], []) == ["0.1", "0.0", "end"]
    assert watched.backward(["0.0", "0.1"], reductions(0)) == ["0.1", "0.0", "reduce 0", "end"]
