"""What happens inside a forward or a backward, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from syncline.program.actions import (
    AccumulateShard,
    Action,
    AllocateGradients,
    Backward,
    Forward,
    FreeGradients,
    FreeParameters,
    GatherParameters,
    Part,
    ReduceGradients,
    WaitGather,
    WaitReduce,
    bucket_of,
)
from syncline.program.layout import Bucket, Slot
from syncline.runtime.backward_hooks import GradientQueue, ParameterQueue
from syncline.runtime.buckets import GradientBucket, StorageCount

BACKWARD = Backward(0, 0)
FORWARD = Forward(0, 0)


class Watched:
    """Three buckets of two parameters each, in which actions are recorded as they happen."""

    def __init__(self, *, persistent: bool = False) -> None:
        self.happened: list[str] = []
        self.parameters: dict[str, nn.Parameter] = {}
        self.buckets: dict[int, GradientBucket] = {}
        self.queue = GradientQueue(self._perform)
        for id in range(3):
            names = [f"{id}.{index}" for index in range(2)]
            own = [self.parameters.setdefault(name, nn.Parameter(torch.ones(4))) for name in names]
            slots = tuple(Slot(name, (4,), 64 * index) for index, name in enumerate(names))
            bucket = GradientBucket(
                Bucket(id, 0, slots, 128), own, torch.float32, StorageCount(), (0, 64), keeps_shard=True
            )
            bucket.allocate(Part.SHARD)
            if persistent:
                bucket.allocate()
            self.buckets[id] = bucket
            for name, parameter in zip(names, own, strict=True):
                parameter.register_post_accumulate_grad_hook(partial(self._accumulated, name))
            self.queue.watch(bucket)

    @property
    def gradients(self) -> dict[int, int]:
        return {id: len(bucket.parameters) for id, bucket in self.buckets.items()}

    def _accumulated(self, name: str, parameter: nn.Parameter) -> None:
        self.happened.append(name)

    def _perform(self, action: Action) -> None:
        bucket = self.buckets[action.bucket]  # type: ignore[attr-defined]
        word = {
            AllocateGradients: "allocate",
            ReduceGradients: "reduce",
            WaitReduce: "wait",
            AccumulateShard: "add",
            FreeGradients: "free",
        }[type(action)]
        {"allocate": bucket.allocate, "add": bucket.accumulate_shard, "free": bucket.free}.get(word, lambda: None)()
        self.happened.append(f"{word} {bucket.bucket.id}")

    def backward(self, chain: Sequence[str], actions: list[Action]) -> list[str]:
        """What happens in and after a backward in which the last of the chain gets its gradient first."""
        self.happened = []
        value = torch.ones(4, requires_grad=True)
        for name in chain:
            value = value * self.parameters[name]
        self.queue.arm(actions, self.gradients)
        value.sum().backward()
        self.happened.append("end")
        self.queue.finish()
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


NAMES = [f"{bucket}.{index}" for bucket in range(3) for index in range(2)]


@given(st.permutations(NAMES), st.integers(0, 6))
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


# ---- Storage that comes and goes inside one backward -----------------------------------------------------------------


def life(bucket: int, *, twice: bool = False) -> dict[str, list[Action]]:
    """From the allocation to the freeing of one bucket; `twice` reduces it over a second group as well."""
    more: list[Action] = [ReduceGradients(bucket, "dp", during=BACKWARD), WaitReduce(bucket, BACKWARD)]
    return {
        "allocation": [AllocateGradients(bucket, BACKWARD)],
        "reduction": [ReduceGradients(bucket, "sharding", kind="reduce_scatter", during=BACKWARD)],
        "rest": [
            WaitReduce(bucket, BACKWARD),
            *(more if twice else []),
            AccumulateShard(bucket, BACKWARD),
            FreeGradients(bucket, BACKWARD),
        ],
    }


def one_after_another(*buckets: int) -> list[Action]:
    """Without overlap: a bucket is freed before the next is allocated."""
    return [action for bucket in buckets for part in life(bucket).values() for action in part]


def one_behind_another(*buckets: int, twice: bool = False) -> list[Action]:
    """With overlap: the rest of a bucket stands behind the allocation of the next."""
    actions: list[Action] = []
    rest: list[Action] = []
    for bucket in buckets:
        own = life(bucket, twice=twice)
        actions += [*own["allocation"], *rest, *own["reduction"]]
        rest = own["rest"]
    return [*actions, *rest]


IN_ORDER = ["2.0", "2.1", "1.0", "1.1", "0.0", "0.1"]


def test_without_overlap_a_bucket_is_freed_before_the_next_gets_storage():
    happened = Watched().backward(IN_ORDER, one_after_another(0, 1, 2))
    assert happened == [
        *("allocate 0", "0.1", "0.0", "reduce 0"),
        *("wait 0", "add 0", "free 0", "allocate 1", "1.1", "1.0", "reduce 1"),
        *("wait 1", "add 1", "free 1", "allocate 2", "2.1", "2.0", "reduce 2"),
        *("end", "wait 2", "add 2", "free 2"),
    ]


def test_with_overlap_a_bucket_is_on_its_way_while_the_next_fills():
    happened = Watched().backward(IN_ORDER, one_behind_another(0, 1, 2))
    assert happened == [
        *("allocate 0", "0.1", "0.0", "reduce 0"),
        *("allocate 1", "1.1", "1.0", "wait 0", "add 0", "free 0", "reduce 1"),
        *("allocate 2", "2.1", "2.0", "wait 1", "add 1", "free 1", "reduce 2"),
        *("end", "wait 2", "add 2", "free 2"),
    ]


def test_a_second_reduction_of_a_bucket_needs_no_gradient():
    happened = Watched().backward(IN_ORDER[2:], one_behind_another(0, 1, twice=True))
    assert happened == [
        *("allocate 0", "0.1", "0.0", "reduce 0"),
        *("allocate 1", "1.1", "1.0", "wait 0", "reduce 0", "wait 0", "add 0", "free 0", "reduce 1"),
        *("end", "wait 1", "reduce 1", "wait 1", "add 1", "free 1"),
    ]


def test_storage_does_not_wait_for_buckets_that_are_expected_before():
    """Bucket 1 fills before bucket 0: it gets its storage at once, and is reduced in its turn."""
    happened = Watched().backward(["0.0", "0.1", "1.0", "1.1"], one_after_another(0, 1))
    assert happened == [
        *("allocate 1", "1.1", "1.0", "allocate 0", "0.1", "0.0"),
        *("reduce 0", "wait 0", "add 0", "free 0", "reduce 1", "end", "wait 1", "add 1", "free 1"),
    ]


PROGRAMS: dict[str, Callable[..., list[Action]]] = {
    "one after another": one_after_another,
    "one behind another": one_behind_another,
    "over two groups": partial(one_behind_another, twice=True),
    "allocated before": lambda *buckets: [*allocations(*buckets), *reductions(*buckets)],
}


@pytest.mark.parametrize("form", PROGRAMS)
@given(order=st.permutations(NAMES), used=st.integers(0, 6), buckets=st.permutations(range(3)))
def test_whatever_arrives_first_or_never_everything_happens_once_and_in_order(form, order, used, buckets):
    """Hooks run on the real autograd; the buckets themselves refuse what comes too early."""
    watched = Watched()
    actions = PROGRAMS[form](*buckets)
    chain = order[:used]
    happened = watched.backward(chain, actions)
    inside = happened[: happened.index("end")]
    words: dict[str, type[Action]] = {
        "allocate": AllocateGradients,
        "reduce": ReduceGradients,
        "wait": WaitReduce,
        "free": FreeGradients,
    }
    for word, kind in words.items():
        expected = [f"{word} {bucket_of(action)}" for action in actions if isinstance(action, kind)]
        found = [entry for entry in happened if entry.startswith(word)]
        if word == "allocate":
            assert sorted(found) == sorted(expected)
        else:
            assert found == expected, "collectives run in the order of the program"
    for name in chain:
        assert happened.index(f"allocate {name[0]}") < happened.index(name), "storage before the first gradient"
        assert inside.index(name) < happened.index(f"reduce {name[0]}"), "a reduction behind the last gradient"


def test_what_is_full_makes_room_for_a_bucket_that_comes_before_its_turn():
    """Bucket 2 gets gradients before bucket 1 is full: bucket 0, which was reduced, is freed for it."""
    happened = Watched().backward(["2.0", "1.0", "2.1", "1.1", "0.0", "0.1"], one_behind_another(0, 1, 2))
    assert happened[:12] == [
        *("allocate 0", "0.1", "0.0", "reduce 0"),
        *("allocate 1", "1.1"),
        *("wait 0", "add 0", "free 0", "allocate 2", "2.1", "1.0"),
    ]


@given(order=st.permutations(NAMES))
def test_waits_happen_as_late_as_the_program_allows(order):
    """Never behind a reduction's gradients alone: only together with the next event, or at the end."""
    happened = Watched().backward(order, one_behind_another(0, 1, 2))
    for bucket in (0, 1):
        wait = happened.index(f"wait {bucket}")
        assert happened[wait : wait + 3] == [f"wait {bucket}", f"add {bucket}", f"free {bucket}"]
        assert happened[wait + 3] in (f"reduce {bucket + 1}", "allocate 2")
    assert happened[-4:] == ["end", "wait 2", "add 2", "free 2"]


def test_nothing_is_left_for_the_next_backward():
    watched = Watched()
    for _ in range(3):
        happened = watched.backward(["0.0", "1.1"], one_behind_another(0, 1, 2))
        assert len([entry for entry in happened if entry.startswith("free")]) == 3
        for parameter in watched.parameters.values():
            assert parameter.grad is None


def test_a_product_that_adds_by_itself_gets_storage_once():
    watched = Watched()
    watched.queue.arm(one_after_another(0, 1), watched.gradients)
    watched.queue.allocate_now(0)
    watched.queue.allocate_now(0)
    watched.queue.allocate_now(2)
    assert watched.happened == ["allocate 0"]
    watched.queue.finish()


# ---- Parameters ------------------------------------------------------------------------------------------------------


class Uses:
    """A queue whose actions, and uses, are recorded as they happen."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.queue = ParameterQueue(self._perform)

    def _perform(self, action: Action) -> None:
        words = {GatherParameters: "gather", WaitGather: "wait", FreeParameters: "free"}
        self.happened.append(f"{words[type(action)]} {action.bucket}")  # type: ignore[attr-defined]

    def forward(self, order: Sequence[int], actions: Sequence[Action]) -> list[str]:
        """What happens in and after a computation that uses buckets in this order."""
        self.happened = []
        self.queue.arm(actions)
        for bucket in order:
            self.queue.use(bucket)
            self.happened.append(f"use {bucket}")
        self.happened.append("end")
        self.queue.finish()
        return self.happened


def around_use(*buckets: int) -> list[Action]:
    """As stage 3: while one bucket is in use the next is on its way; the last one stays."""
    actions: list[Action] = []
    for index, bucket in enumerate(buckets):
        actions.append(WaitGather(bucket, FORWARD))
        if index > 0:
            actions.append(FreeParameters(buckets[index - 1], FORWARD))
        if index + 1 < len(buckets):
            actions.append(GatherParameters(buckets[index + 1], "sharding", during=FORWARD))
    return actions


def test_the_first_use_waits_and_what_follows_follows_at_once():
    happened = Uses().forward([2, 1, 1, 0], around_use(2, 1, 0))
    assert happened == [
        *("wait 2", "gather 1", "use 2"),
        *("wait 1", "free 2", "gather 0", "use 1", "use 1"),
        *("wait 0", "free 1", "use 0", "end"),
    ]


def test_what_stands_before_the_first_wait_happens_before_the_computation():
    """A backward begins with a bucket that is there: the next one is fetched at once."""
    uses = Uses()
    uses.queue.arm([GatherParameters(1, "sharding", during=BACKWARD), *around_use(1, 0)])
    assert uses.happened == ["gather 1"]
    uses.queue.use(0)
    assert uses.happened == ["gather 1", "wait 1", "gather 0", "wait 0"]
    uses.queue.finish()
    assert uses.happened[4:] == ["free 1"]


def test_a_bucket_that_is_used_later_than_expected_is_freed_at_the_end():
    happened = Uses().forward([1, 2, 0], around_use(2, 1, 0))
    assert happened == [
        *("wait 2", "gather 1", "wait 1", "gather 0", "use 1", "use 2"),
        *("wait 0", "free 1", "use 0", "end", "free 2"),
    ]


def test_a_bucket_that_is_never_used_is_waited_for_and_freed_all_the_same():
    assert Uses().forward([2], around_use(2, 1, 0)) == [
        *("wait 2", "gather 1", "use 2", "end"),
        *("wait 1", "free 2", "gather 0", "wait 0", "free 1"),
    ]


def test_updated_parameters_are_waited_for_in_their_order():
    """Stages 1 and 2: the gathers of the last step are under way."""
    waits = [WaitGather(bucket, FORWARD) for bucket in (2, 1, 0)]
    assert Uses().forward([2, 0, 1], waits) == ["wait 2", "use 2", "wait 1", "wait 0", "use 0", "use 1", "end"]


@given(st.permutations(range(4)), st.lists(st.integers(0, 3), max_size=8))
def test_any_order_of_uses_keeps_the_order_of_gathers(expected, order):
    actions = around_use(*expected)
    happened = Uses().forward(order, actions)
    assert [entry for entry in happened if entry.startswith("gather")] == [f"gather {id}" for id in expected[1:]]
    assert [entry for entry in happened if entry.startswith("wait")] == [f"wait {id}" for id in expected]
    frees = [entry for entry in happened if entry.startswith("free")]
    assert sorted(frees) == sorted(f"free {id}" for id in expected[:-1])
    for bucket in set(order):
        assert happened.index(f"wait {bucket}") < happened.index(f"use {bucket}")
        if f"free {bucket}" in happened:
            assert happened.index(f"use {bucket}") < happened.index(f"free {bucket}"), "freed before it was used"


def test_uses_of_one_computation_do_not_count_for_the_next():
    uses = Uses()
    uses.forward([2, 1, 0], around_use(2, 1, 0))
    assert uses.forward([], around_use(2, 1))[-3:] == ["gather 1", "wait 1", "free 2"]


def test_a_use_outside_of_all_that_is_queued_does_nothing():
    uses = Uses()
    uses.queue.use(7)
    assert uses.happened == []
