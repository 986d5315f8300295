"""When passes let parameters be gathered and freed, as text."""

from __future__ import annotations

import pytest

from syncline.program.display.text import listing
from syncline.program.naive import forward_program, naive_program
from syncline.program.passes.divide_parameters import gather_around_use
from syncline.program.passes.fold_scales import fold_scales
from syncline.program.passes.gather_overlap import gather_behind_forward
from syncline.program.passes.sharding import shard_updates, step_in_place
from syncline.program.passes.sync_moment import sync_last_micro_batch
from syncline.program.program import Program, Sizes
from syncline.schedules import SCHEDULES
from syncline.schedules.placement import Placement
from syncline.strategy import Ownership
from syncline.strategy.topology import Topology
from tests.program.examples import small_layout, small_sharded
from tests.program.listings import assert_listing, lines_of

SLICES = Ownership.SLICES


def test_gather_behind_forward_waits_at_the_next_steps_first_use():
    program = gather_behind_forward(step_in_place(fold_scales(sync_last_micro_batch(small_sharded(SLICES)))))
    assert_listing(
        program,
        0,
        """
        count tokens over sharding
        forward 0
        wait gather 1 during forward 0
        wait gather 0 during forward 0
        backward 0
        forward 1
        backward 1
        reduce gradients 0 sum over sharding by reduce-scatter
        wait reduce 0
        reduce gradients 1 sum over sharding by reduce-scatter
        wait reduce 1
        clip gradients of buckets 0,1 over sharding by 1/replicas
        optimizer step 1 by 1/replicas
        zero gradients 1
        gather parameters 1 over sharding by all-gather
        optimizer step 0 by 1/replicas
        zero gradients 0
        gather parameters 0 over sharding by all-gather
        reduce loss over world
        """,
    )


def parameters_only(program: Program, rank: int) -> list[str]:
    """What becomes of parameters, around the computations that use them."""
    kinds = ("forward", "backward", "gather", "wait gather", "free parameters")
    return [
        line.replace(" over sharding by all-gather", "") for line in listing(program, rank) if line.startswith(kinds)
    ]


def divided(*, stages: int = 1, micro_batches: int = 1, schedule: str = "1F1B", layers: int = 1, **options) -> Program:
    """As stage 3, two ranks to a stage."""
    topology = Topology(pp=stages, sharding=2)
    layout = small_layout(stages=stages, layers=layers, ownership=SLICES, shards=2, divide_parameters=True, **options)
    program = naive_program(topology, Placement(stages), layout, micro_batches, SCHEDULES[schedule], Sizes())
    return gather_around_use(shard_updates(program))


def test_gather_around_use_holds_what_is_in_use_and_what_comes_next():
    """Buckets 2 and 1, the parts of the only layer, are used together; the head, bucket 0, ends the forward and begins
    the backward.
    """
    assert parameters_only(divided(), 0) == lines_of(
        """
        gather parameters 3
        forward 0
        wait gather 3 during forward 0
        gather parameters 2 during forward 0
        wait gather 2 during forward 0
        free parameters 3 during forward 0
        gather parameters 1 during forward 0
        wait gather 1 during forward 0
        gather parameters 0 during forward 0
        wait gather 0 during forward 0
        free parameters 2 during forward 0
        free parameters 1 during forward 0
        backward 0
        gather parameters 2 during backward 0
        wait gather 2 during backward 0
        free parameters 0 during backward 0
        gather parameters 1 during backward 0
        wait gather 1 during backward 0
        gather parameters 3 during backward 0
        wait gather 3 during backward 0
        free parameters 2 during backward 0
        free parameters 1 during backward 0
        free parameters 3
        """
    )


def test_a_bucket_with_which_the_next_computation_begins_stays():
    """Of two micro-batches the embedding, bucket 1, is used last by the first and first by the second."""
    assert parameters_only(divided(layers=0, micro_batches=2), 1) == lines_of(
        """
        gather parameters 1
        forward 0
        wait gather 1 during forward 0
        gather parameters 0 during forward 0
        wait gather 0 during forward 0
        free parameters 1 during forward 0
        backward 0
        gather parameters 1 during backward 0
        wait gather 1 during backward 0
        free parameters 0 during backward 0
        forward 1
        gather parameters 0 during forward 1
        wait gather 0 during forward 1
        free parameters 1 during forward 1
        backward 1
        gather parameters 1 during backward 1
        wait gather 1 during backward 1
        free parameters 0 during backward 1
        free parameters 1
        """
    )


def test_gather_around_use_frees_what_was_gathered_at_the_end_of_a_step_too():
    lines = listing(divided(layers=0), 0)
    assert lines[-5:] == [
        "optimizer step 1",
        "zero gradients 1 shard",
        "optimizer step 0",
        "zero gradients 0 shard",
        "reduce loss over world",
    ]


def test_a_bucket_that_is_used_again_at_the_end_of_the_forward_stays_until_then():
    """The embedding, bucket 2, is the head as well: it is there throughout, and the backward begins with it."""
    assert parameters_only(divided(tied=True), 0) == lines_of(
        """
        gather parameters 2
        forward 0
        wait gather 2 during forward 0
        gather parameters 1 during forward 0
        wait gather 1 during forward 0
        gather parameters 0 during forward 0
        wait gather 0 during forward 0
        free parameters 1
        free parameters 0
        backward 0
        gather parameters 1 during backward 0
        wait gather 1 during backward 0
        gather parameters 0 during backward 0
        wait gather 0 during backward 0
        free parameters 2
        free parameters 1
        free parameters 0
        """
    )


def test_a_frozen_bucket_is_gathered_as_well_and_never_reduced():
    program = divided(layers=0, frozen=["embedding"])
    assert [bucket.frozen for bucket in program.layout.buckets] == [False, True]
    lines = listing(program, 0)
    assert [line for line in lines if line.startswith("gather parameters 1")] == [
        "gather parameters 1 over sharding by all-gather",
        "gather parameters 1 over sharding by all-gather during backward 0",
    ]
    assert not [
        line for line in lines if line.startswith(("reduce gradients 1", "optimizer step 1", "zero gradients 1"))
    ]


PIPELINED = {
    "1F1B": """
        gather parameters 2
        forward 0
        wait gather 2 during forward 0
        gather parameters 1 during forward 0
        wait gather 1 during forward 0
        free parameters 2 during forward 0
        gather parameters 0 during forward 0
        wait gather 0 during forward 0
        free parameters 1
        free parameters 0
        gather parameters 2
        forward 1
        wait gather 2 during forward 1
        gather parameters 1 during forward 1
        wait gather 1 during forward 1
        free parameters 2 during forward 1
        gather parameters 0 during forward 1
        wait gather 0 during forward 1
        free parameters 0
        backward 0
        gather parameters 0 during backward 0
        wait gather 0 during backward 0
        gather parameters 2 during backward 0
        wait gather 2 during backward 0
        free parameters 1 during backward 0
        free parameters 0 during backward 0
        forward 2
        gather parameters 1 during forward 2
        wait gather 1 during forward 2
        free parameters 2 during forward 2
        gather parameters 0 during forward 2
        wait gather 0 during forward 2
        free parameters 0
        backward 1
        """,
    "FThenB": """
        gather parameters 2
        forward 0
        wait gather 2 during forward 0
        gather parameters 1 during forward 0
        wait gather 1 during forward 0
        free parameters 2 during forward 0
        gather parameters 0 during forward 0
        wait gather 0 during forward 0
        free parameters 1
        free parameters 0
        gather parameters 2
        forward 1
        wait gather 2 during forward 1
        gather parameters 1 during forward 1
        wait gather 1 during forward 1
        free parameters 2 during forward 1
        gather parameters 0 during forward 1
        wait gather 0 during forward 1
        free parameters 1
        free parameters 0
        gather parameters 2
        forward 2
        wait gather 2 during forward 2
        gather parameters 1 during forward 2
        wait gather 1 during forward 2
        free parameters 2 during forward 2
        gather parameters 0 during forward 2
        wait gather 0 during forward 2
        free parameters 0
        backward 0
        gather parameters 0 during backward 0
        wait gather 0 during backward 0
        gather parameters 2 during backward 0
        wait gather 2 during backward 0
        free parameters 1 during backward 0
        free parameters 0 during backward 0
        free parameters 2
        gather parameters 1
        backward 1
        """,
}


@pytest.mark.parametrize("schedule", PIPELINED)
def test_gather_around_use_follows_the_schedule_of_a_pipeline(schedule):
    """The first stage holds the embedding, bucket 2, and a layer of two parts, buckets 1 and 0."""
    program = divided(stages=2, micro_batches=3, schedule=schedule, layers=2)
    assert [bucket.stage for bucket in program.layout.buckets] == [0, 0, 0, 1, 1, 1]
    lines = parameters_only(program, 0)
    assert lines[: lines.index("backward 1") + 1] == lines_of(PIPELINED[schedule])


def test_gather_around_use_begins_before_a_stage_waits_for_what_it_computes_with():
    program = divided(stages=2, micro_batches=2, schedule="FThenB", layers=2)
    lines = listing(program, 2)
    assert lines.index("gather parameters 5 over sharding by all-gather") < lines.index(
        "receive activation 0 from rank 0"
    )


def test_an_evaluation_gathers_around_its_forwards():
    layout = small_layout(ownership=SLICES, shards=2, divide_parameters=True)
    program = gather_around_use(forward_program(Topology(sharding=2), Placement(), layout, 2, Sizes()))
    assert_listing(
        program,
        0,
        """
        gather parameters 1 over sharding by all-gather
        count tokens over sharding
        forward 0
        wait gather 1 during forward 0
        gather parameters 0 over sharding by all-gather during forward 0
        wait gather 0 during forward 0
        free parameters 1 during forward 0
        free parameters 0
        gather parameters 1 over sharding by all-gather
        forward 1
        wait gather 1 during forward 1
        gather parameters 0 over sharding by all-gather during forward 1
        wait gather 0 during forward 1
        free parameters 1 during forward 1
        free parameters 0
        reduce loss over world
        """,
    )
