"""What `syncline program --without` shows: two programs in two columns."""

from __future__ import annotations

from dataclasses import replace

from syncline.program.display.compare import compare
from syncline.strategy import Sharding, Strategy, SyncMoment
from syncline.strategy.topology import Topology
from tests.program.examples import small_program

TITLES = ("without it", "with it")
STRATEGY = Strategy(topology=Topology(dp=2), micro_batches=2, overlap=False)


def columns(left: Strategy, right: Strategy) -> list[str]:
    return compare(small_program(left), small_program(right), TITLES).splitlines()


def test_a_program_and_itself_are_the_same():
    lines = columns(STRATEGY, STRATEGY)
    assert lines[0].split() == ["without", "it", "with", "it"]
    assert [line for line in lines[1:] if line] == ["rank 0: the same", "summary: the same"]


def test_what_only_one_has_stands_on_its_side():
    lines = columns(STRATEGY, replace(STRATEGY, release_gradients=True))
    zero = [line for line in lines if "zero gradients 0" in line]
    assert zero == [line for line in lines if line.startswith("< zero gradients 0") and "> free gradients 0" in line]
    assert len(zero) == 1
    assert any(line.lstrip().startswith("> allocate gradients 0 during backward 0") for line in lines)
    (held,) = [line for line in lines if "gradient bytes between steps" in line]
    assert held.startswith("<")
    assert held.split()[-1] == "0"


def test_what_stands_elsewhere_is_moved_and_counted_once():
    after = replace(STRATEGY, sync=SyncMoment.AFTER_ACCUMULATION)
    lines = columns(replace(STRATEGY, sync=SyncMoment.LAST_MICRO_BATCH), after)
    (title,) = [line for line in lines if line.startswith("rank 0")]
    moved = int(title.split(": ")[1].split()[0])
    assert title == f"rank 0: {moved} moved"
    assert moved > 0
    marked = [line for line in lines if line.startswith("~") or "~ " in line]
    assert all("reduce gradients" in line for line in marked), marked


def test_long_equal_stretches_are_left_out_and_counted():
    lines = columns(STRATEGY, replace(STRATEGY, release_gradients=True))
    assert any(line.startswith("  ... ") and line.endswith(" the same ...") for line in lines)


def test_other_buckets_are_shown():
    sharded = Strategy(topology=Topology(sharding=2), micro_batches=2, sharding=Sharding.STAGE1_TENSOR)
    lines = columns(STRATEGY, sharded)
    assert any(line.startswith("buckets: ") for line in lines)
    assert any("owner: 1" in line for line in lines)
    assert any(line.startswith("rank 1: ") for line in lines), "ranks own different buckets, so both are shown"
