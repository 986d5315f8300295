"""Who owns what, where buckets begin and end, and which settings updates which part of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.program.layout import ALIGNMENT, ParameterLayout, ParameterSpec, Segment, Slot, lay_out
from syncline.strategy import Ownership
from tests.program.examples import small_layout

REPLICATED, TENSORS, SLICES = Ownership.REPLICATED, Ownership.TENSORS, Ownership.SLICES
ITEMSIZE = 4


def aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def layer(index: int, sizes: Sequence[int], *, stage: int = 0, **fields: object) -> list[ParameterSpec]:
    """The parameters of one block, used at the place `index`."""
    return [
        ParameterSpec(
            f"layers.{index}.{part}",
            (size,),
            stage,
            block=f"layers.{index}",
            first_use=index,
            last_use=index,
            **fields,  # type: ignore[arg-type]
        )
        for part, size in enumerate(sizes)
    ]


@st.composite
def models(draw: st.DrawFn) -> list[ParameterSpec]:
    """Some layers on one or two stages; some parameters are frozen, have the other settings, or are used again."""
    stages = draw(st.integers(1, 2))
    last = draw(st.integers(stages, 6))
    specs = []
    for index in range(last):
        for part in range(draw(st.integers(1, 4))):
            specs.append(
                ParameterSpec(
                    f"layers.{index}.{part}",
                    tuple(draw(st.lists(st.integers(1, 30), min_size=0, max_size=2))),
                    index * stages // last,
                    settings=draw(st.integers(0, 1)),
                    frozen=draw(st.integers(0, 9)) == 0,
                    block=f"layers.{index}",
                    first_use=index,
                    last_use=last if draw(st.integers(0, 9)) == 0 else index,
                )
            )
    if stages > 1 and draw(st.booleans()):
        shape = (draw(st.integers(1, 300)),)
        specs.insert(0, ParameterSpec("embedding", shape, 0, block="embedding"))
        specs.append(ParameterSpec("head", shape, stages - 1, tied_to="embedding", first_use=last, last_use=last))
    return specs


def layouts_of(specs: Sequence[ParameterSpec], limit: int, shards: int) -> dict[str, ParameterLayout]:
    """Under every form of ownership."""
    return {
        name: lay_out(
            specs,
            bucket_bytes=limit * ITEMSIZE,
            gradient_itemsize=ITEMSIZE,
            ownership=ownership,
            shards=1 if ownership is REPLICATED else shards,
            divide_parameters=divide,
        )
        for name, ownership, divide in (
            ("replicated", REPLICATED, False),
            ("tensors", TENSORS, False),
            ("slices", SLICES, False),
            ("divided", SLICES, True),
        )
    }


LIMITS, SHARDS = st.integers(1, 2000), st.integers(2, 5)


@given(models(), LIMITS, SHARDS)
def test_every_trainable_parameter_has_one_place_of_its_own(specs, limit, shards):
    for name, layout in layouts_of(specs, limit, shards).items():
        found = [(bucket.stage, slot.name) for bucket in layout.buckets for slot in bucket.slots]
        expected = [(spec.stage, spec.name) for spec in specs if name == "divided" or not spec.frozen]
        assert sorted(found) == sorted(expected)
        assert [bucket.id for bucket in layout.buckets] == list(range(len(layout.buckets)))
        assert [bucket.stage for bucket in layout.buckets] == sorted(bucket.stage for bucket in layout.buckets)
        for bucket in layout.buckets:
            ends = [0, *(slot.offset + aligned(slot.numel) for slot in bucket.slots)]
            assert [slot.offset for slot in bucket.slots] == ends[:-1], "nothing overlaps, and nothing lies idle"
            assert bucket.numel >= ends[-1]


@given(models(), LIMITS, SHARDS)
def test_a_bucket_holds_no_more_than_its_limit_unless_one_parameter_does(specs, limit, shards):
    """The padding behind the parameter that is added last does not count."""
    for layout in layouts_of(specs, limit, shards).values():
        for bucket in layout.buckets:
            whole = sum(aligned(slot.numel) for slot in bucket.slots)
            without_last_padding = min(whole - aligned(slot.numel) + slot.numel for slot in bucket.slots)
            assert len(bucket.slots) == 1 or without_last_padding <= limit


@given(models(), LIMITS, SHARDS)
def test_slices_divide_every_bucket_evenly(specs, limit, shards):
    for name in ("slices", "divided"):
        layout = layouts_of(specs, limit, shards)[name]
        for bucket in layout.buckets:
            assert bucket.owner is None
            ranges = [layout.owned(bucket.id, shard) for shard in range(shards)]
            assert len({stop - start for start, stop in ranges}) == 1
            assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
            assert ranges[-1][1] == bucket.numel
            assert all(edge % ALIGNMENT == 0 for edges in ranges for edge in edges)


@given(models(), LIMITS, SHARDS)
def test_tensors_give_every_bucket_to_one_owner(specs, limit, shards):
    layout = layouts_of(specs, limit, shards)["tensors"]
    for bucket in layout.buckets:
        assert bucket.owner in range(shards)
        for shard in range(shards):
            owned = layout.owned(bucket.id, shard)
            assert owned == ((0, bucket.numel) if shard == bucket.owner else (0, 0))


@given(models(), LIMITS, SHARDS)
def test_no_owner_of_tensors_has_more_than_the_average_and_one_tensor(specs, limit, shards):
    layout = layouts_of(specs, limit, shards)["tensors"]
    for stage in {spec.stage for spec in specs}:
        loads = [0] * shards
        for bucket in layout.of_stage(stage):
            assert bucket.owner is not None
            loads[bucket.owner] += bucket.numel
        sizes = [aligned(slot.numel) for bucket in layout.of_stage(stage) for slot in bucket.slots]
        assert sum(loads) == sum(sizes)
        assert max(loads) <= sum(loads) / shards + max(sizes, default=0)


def test_equal_tensors_are_shared_out_equally():
    specs = [spec for index in range(8) for spec in layer(index, [640, 640])]
    layout = lay_out(specs, bucket_bytes=2000 * ITEMSIZE, gradient_itemsize=ITEMSIZE, ownership=TENSORS, shards=4)
    loads = [sum(bucket.numel for bucket in layout.buckets if bucket.owner == owner) for owner in range(4)]
    assert loads == [4 * 640] * 4


def test_what_one_owner_has_is_near_together_in_the_backward():
    """Every owner gets buckets from every part of the model, so that each fills early."""
    specs = [spec for index in range(8) for spec in layer(index, [640])]
    layout = lay_out(specs, bucket_bytes=640 * ITEMSIZE, gradient_itemsize=ITEMSIZE, ownership=TENSORS, shards=2)
    owners = [bucket.owner for bucket in layout.buckets]
    assert all({owners[index], owners[index + 1]} == {0, 1} for index in range(0, 8, 2))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1, [["2.1"], ["2.0"], ["1.1"], ["1.0"], ["0.1"], ["0.0"]]),
        (192, [["2.1", "2.0"], ["1.1", "1.0"], ["0.1", "0.0"]]),
        (200, [["2.1", "2.0"], ["1.1", "1.0"], ["0.1", "0.0"]]),
        (384, [["2.1", "2.0", "1.1", "1.0"], ["0.1", "0.0"]]),
        (128, [["2.1"], ["2.0"], ["1.1"], ["1.0"], ["0.1"], ["0.0"]]),
        (10_000, [["2.1", "2.0", "1.1", "1.0", "0.1", "0.0"]]),
    ],
)
def test_buckets_end_between_blocks_where_they_can(limit, expected):
    """Blocks of 192 elements in two parameters, the last block's first."""
    specs = [spec for index in range(3) for spec in layer(index, [128, 64])]
    layout = lay_out(specs, bucket_bytes=limit * ITEMSIZE, gradient_itemsize=ITEMSIZE)
    found = [[slot.name.removeprefix("layers.") for slot in bucket.slots] for bucket in layout.buckets]
    assert found == expected


def test_what_the_forward_uses_first_comes_last_whatever_the_order_of_registration():
    specs = [*layer(2, [64]), *layer(0, [64]), *layer(1, [64])]
    layout = lay_out(specs, bucket_bytes=1, gradient_itemsize=ITEMSIZE)
    assert [bucket.slots[0].name for bucket in layout.buckets] == ["layers.2.0", "layers.1.0", "layers.0.0"]
    assert [bucket.first_use for bucket in layout.buckets] == [2, 1, 0]


@pytest.mark.parametrize("ownership", [REPLICATED, TENSORS, SLICES])
def test_a_parameter_that_is_used_again_stands_alone(ownership):
    specs = [
        ParameterSpec("embedding", (64,), 0, first_use=0, last_use=4, block="embedding"),
        *(spec for index in range(1, 4) for spec in layer(index, [64, 64])),
    ]
    shards = 1 if ownership is REPLICATED else 2
    layout = lay_out(specs, bucket_bytes=1 << 20, gradient_itemsize=ITEMSIZE, ownership=ownership, shards=shards)
    (alone,) = (bucket for bucket in layout.buckets if bucket.last_use > bucket.first_use and len(bucket.slots) == 1)
    assert [slot.name for slot in alone.slots] == ["embedding"]
    assert (alone.first_use, alone.last_use, alone.tie) == (0, 4, None)
    assert alone is layout.buckets[-1], "it is full last, when the gradient of its first use has come"


@pytest.mark.parametrize("ownership", [TENSORS, SLICES])
@pytest.mark.parametrize("shards", [2, 3])
def test_copies_of_a_tied_parameter_have_the_same_owner_and_the_same_slices(ownership, shards):
    layout = small_layout(stages=3, layers=3, tied=True, ownership=ownership, shards=shards)
    first, second = (bucket for bucket in layout.buckets if bucket.tie is not None)
    assert (first.stage, second.stage) == (0, 2)
    assert (first.slots[0].name, second.slots[0].name) == ("embedding", "head")
    assert first.tie == second.tie == "embedding"
    assert first.tie_stages == second.tie_stages == (0, 2)
    assert first.owner == second.owner
    assert first.numel == second.numel
    for shard in range(shards):
        assert layout.owned(first.id, shard) == layout.owned(second.id, shard)
    assert (first.counts_in_norm, second.counts_in_norm) == (True, False)


def test_several_tied_parameters_have_different_owners():
    specs = []
    for name in ("a", "b", "c"):
        specs.append(ParameterSpec(name, (64,), 0))
    specs += [ParameterSpec(f"copy of {name}", (64,), 1, tied_to=name) for name in ("a", "b", "c")]
    layout = lay_out(specs, bucket_bytes=1 << 20, gradient_itemsize=ITEMSIZE, ownership=TENSORS, shards=3)
    owners = {(bucket.tie, bucket.stage): bucket.owner for bucket in layout.buckets}
    for name in ("a", "b", "c"):
        assert owners[name, 0] == owners[name, 1]
    assert {owners[name, 0] for name in ("a", "b", "c")} == {0, 1, 2}


@given(models(), LIMITS, SHARDS)
def test_frozen_parameters_have_buckets_only_where_parameters_are_divided(specs, limit, shards):
    frozen = {spec.name for spec in specs if spec.frozen}
    for name, layout in layouts_of(specs, limit, shards).items():
        in_buckets = {slot.name for bucket in layout.buckets if bucket.frozen for slot in bucket.slots}
        assert in_buckets == (frozen if name == "divided" else set())
        trained = [bucket for stage in (0, 1) for bucket in layout.of_stage(stage)]
        assert trained == [bucket for bucket in layout.buckets if not bucket.frozen]
        assert [b for stage in (0, 1) for b in layout.all_of_stage(stage)] == list(layout.buckets)
        assert all({slot.name for slot in bucket.slots}.isdisjoint(frozen) for bucket in trained)


def test_a_bucket_knows_when_it_is_used():
    specs = [spec for index in range(4) for spec in layer(index, [64])]
    layout = lay_out(specs, bucket_bytes=128 * ITEMSIZE, gradient_itemsize=ITEMSIZE)
    assert [(bucket.first_use, bucket.last_use) for bucket in layout.buckets] == [(2, 3), (0, 1)]


# ---- Settings -------------------------------------------------------------------------------------------------------


def test_the_parameters_of_one_rule_stand_together():
    specs = [
        *layer(0, [64], settings=0),
        *layer(1, [10], settings=1),
        *layer(2, [100], settings=0),
        *layer(3, [5, 5], settings=1),
    ]
    (bucket,) = lay_out(specs, bucket_bytes=1 << 20, gradient_itemsize=ITEMSIZE).buckets
    assert [slot.name for slot in bucket.slots] == [
        *("layers.2.0", "layers.0.0"),
        *("layers.3.1", "layers.3.0", "layers.1.0"),
    ]
    assert bucket.segments == (Segment(0, 0, 192), Segment(1, 192, 384))


def test_padding_belongs_to_the_segment_before_it():
    specs = [*layer(0, [3], settings=0), *layer(1, [3], settings=1)]
    (bucket,) = lay_out(specs, bucket_bytes=1 << 20, gradient_itemsize=ITEMSIZE, ownership=SLICES, shards=3).buckets
    assert bucket.numel == 3 * ALIGNMENT
    assert bucket.segments == (Segment(0, 0, ALIGNMENT), Segment(1, ALIGNMENT, 3 * ALIGNMENT))


@given(models(), LIMITS, SHARDS)
def test_segments_cover_each_bucket_once_and_agree_with_its_slots(specs, limit, shards):
    all_settings = {(spec.stage, spec.name): spec.settings for spec in specs}
    for layout in layouts_of(specs, limit, shards).values():
        for bucket in layout.buckets:
            edges = [edge for segment in bucket.segments for edge in (segment.start, segment.stop)]
            assert edges[0] == 0
            assert edges[-1] == bucket.numel
            assert edges[1:-1:2] == edges[2:-1:2]
            kinds = [settings for settings, _ in groupby(segment.settings for segment in bucket.segments)]
            assert kinds == sorted(set(kinds)), "one segment for each settings"
            for slot in bucket.slots:
                (segment,) = (s for s in bucket.segments if s.start <= slot.offset < s.stop)
                assert segment.settings == slot.settings == all_settings[bucket.stage, slot.name]
                assert slot.offset + slot.numel <= segment.stop


def test_a_scalar_takes_one_element():
    assert ParameterSpec("scalar", (), 0).numel == prod(()) == 1
    assert Slot("scalar", (), 0).numel == 1
