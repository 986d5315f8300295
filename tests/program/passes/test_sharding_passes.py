"""What passes make of a program whose ranks divide the updates, as text."""

from __future__ import annotations

from syncline.program.display.text import listing
from syncline.program.passes.allocation import allocate_where_written
from syncline.program.passes.average import average_in_collective
from syncline.program.passes.fold_scales import fold_scales
from syncline.program.passes.free_in_comm import free_in_communication, reduce_inside
from syncline.program.passes.loss_scaling import scale_losses_up
from syncline.program.passes.normalization import token_mean
from syncline.program.passes.overlap import overlap_reductions
from syncline.program.passes.release import release_gradients
from syncline.program.passes.sharding import shard_updates, step_in_place
from syncline.program.passes.sync_moment import sync_after_accumulation, sync_last_micro_batch
from syncline.program.passes.tied_weights import sum_tied_gradients
from syncline.program.program import Program
from syncline.strategy import Ownership
from tests.program.examples import small_naive, small_sharded
from tests.program.listings import assert_listing, lines_of, section

SLICES, TENSORS = Ownership.SLICES, Ownership.TENSORS


def test_shard_updates_by_slices_reduces_to_every_owner_and_gathers_what_they_updated():
    before = small_naive(ownership=SLICES, shards=2, micro_batches=1)
    naive = """
        count tokens over sharding
        forward 0
        backward 0
        reduce gradients 0 sum over sharding
        wait reduce 0
        scale gradients 0 by 1/replicas
        reduce gradients 1 sum over sharding
        wait reduce 1
        scale gradients 1 by 1/replicas
        clip gradients of buckets 0,1 over pp
        optimizer step 0
        zero gradients 0
        optimizer step 1
        zero gradients 1
        reduce loss over world
        """
    sharded = """
        count tokens over sharding
        forward 0
        backward 0
        reduce gradients 0 sum over sharding by reduce-scatter
        wait reduce 0
        accumulate shard 0
        zero gradients 0
        reduce gradients 1 sum over sharding by reduce-scatter
        wait reduce 1
        accumulate shard 1
        zero gradients 1
        scale gradients 0 by 1/replicas
        scale gradients 1 by 1/replicas
        clip gradients of buckets 0,1 over sharding
        optimizer step 1
        zero gradients 1 shard
        gather parameters 1 over sharding by all-gather
        optimizer step 0
        zero gradients 0 shard
        gather parameters 0 over sharding by all-gather
        wait gather 1
        wait gather 0
        reduce loss over world
        """
    for rank in range(2):
        assert_listing(before, rank, naive)
        assert_listing(shard_updates(before), rank, sharded)


def test_shard_updates_by_tensors_reduces_to_one_owner_who_broadcasts():
    program = small_sharded(TENSORS, micro_batches=1)
    assert [bucket.owner for bucket in program.layout.buckets] == [0, 1]
    assert_listing(
        program,
        0,
        """
        count tokens over sharding
        forward 0
        backward 0
        reduce gradients 0 sum over sharding by reduce
        wait reduce 0
        accumulate shard 0
        zero gradients 0
        reduce gradients 1 sum over sharding by reduce
        wait reduce 1
        zero gradients 1
        scale gradients 0 by 1/replicas
        clip gradients of buckets 0 over sharding
        gather parameters 1 over sharding by broadcast
        optimizer step 0
        zero gradients 0 shard
        gather parameters 0 over sharding by broadcast
        wait gather 1
        wait gather 0
        reduce loss over world
        """,
    )
    assert_listing(
        program,
        1,
        """
        count tokens over sharding
        forward 0
        backward 0
        reduce gradients 0 sum over sharding by reduce
        wait reduce 0
        zero gradients 0
        reduce gradients 1 sum over sharding by reduce
        wait reduce 1
        accumulate shard 1
        zero gradients 1
        scale gradients 1 by 1/replicas
        clip gradients of buckets 1 over sharding
        optimizer step 1
        zero gradients 1 shard
        gather parameters 1 over sharding by broadcast
        gather parameters 0 over sharding by broadcast
        wait gather 1
        wait gather 0
        reduce loss over world
        """,
    )


def test_shard_updates_of_several_replicas_reduces_across_them_what_each_owner_owns():
    by_slices = small_sharded(SLICES, replicas=2, micro_batches=1)
    assert section(by_slices, 0, "backward 0", "zero gradients 0") == lines_of(
        """
        backward 0
        reduce gradients 0 sum over sharding by reduce-scatter
        wait reduce 0
        reduce gradients 0 sum over dp
        wait reduce 0
        accumulate shard 0
        zero gradients 0
        """
    )
    by_tensors = small_sharded(TENSORS, replicas=2, micro_batches=1)
    for rank, sharding in enumerate([0, 1, 0, 1]):
        owned, other = sharding, 1 - sharding
        dp = [line for line in listing(by_tensors, rank) if line.endswith("over dp")]
        assert dp == [f"reduce gradients {owned} sum over dp"]
        assert section(
            by_tensors, rank, f"reduce gradients {other} sum over sharding by reduce", f"zero gradients {other}"
        ) == [
            f"reduce gradients {other} sum over sharding by reduce",
            f"wait reduce {other}",
            f"zero gradients {other}",
        ]


def test_updates_and_gathers_run_in_the_order_of_the_next_forward():
    lines = listing(small_sharded(SLICES, layers=1, micro_batches=1), 0)
    assert [line for line in lines if line.startswith("optimizer")] == [f"optimizer step {id}" for id in (3, 2, 1, 0)]
    assert [line.split(" over")[0] for line in lines if line.startswith("gather")] == [
        f"gather parameters {id}" for id in (3, 2, 1, 0)
    ]
    assert [line for line in lines if line.startswith("wait gather")] == [f"wait gather {id}" for id in (3, 2, 1, 0)]


def test_step_in_place_needs_no_shard_where_a_bucket_is_reduced_once():
    program = step_in_place(sync_last_micro_batch(small_sharded(SLICES)))
    assert_listing(
        program,
        1,
        """
        count tokens over sharding
        forward 0
        backward 0
        forward 1
        backward 1
        reduce gradients 0 sum over sharding by reduce-scatter
        wait reduce 0
        reduce gradients 1 sum over sharding by reduce-scatter
        wait reduce 1
        scale gradients 0 by 1/replicas
        scale gradients 1 by 1/replicas
        clip gradients of buckets 0,1 over sharding
        optimizer step 1
        zero gradients 1
        gather parameters 1 over sharding by all-gather
        optimizer step 0
        zero gradients 0
        gather parameters 0 over sharding by all-gather
        wait gather 1
        wait gather 0
        reduce loss over world
        """,
    )


def test_step_in_place_leaves_the_clearing_of_what_somebody_else_owns():
    program = step_in_place(sync_last_micro_batch(small_sharded(TENSORS, micro_batches=1)))
    zeros = [line for line in listing(program, 0) if line.startswith(("zero", "clip", "optimizer"))]
    assert zeros == [
        "zero gradients 1",
        "clip gradients of buckets 0 over sharding",
        "optimizer step 0",
        "zero gradients 0",
    ]


def freed(program: Program) -> Program:
    """As stages 2 and 3, and `free_grads_in_comm`, without overlap."""
    return allocate_where_written(reduce_inside(free_in_communication(fold_scales(program))))


def test_free_in_communication_keeps_shards_only():
    once = sync_last_micro_batch(small_sharded(SLICES))
    assert_listing(
        free_in_communication(once),
        0,
        """
        count tokens over sharding
        forward 0
        backward 0
        forward 1
        backward 1
        reduce gradients 0 sum over sharding by reduce-scatter
        wait reduce 0
        accumulate shard 0
        free gradients 0
        reduce gradients 1 sum over sharding by reduce-scatter
        wait reduce 1
        accumulate shard 1
        free gradients 1
        scale gradients 0 by 1/replicas
        scale gradients 1 by 1/replicas
        clip gradients of buckets 0,1 over sharding
        optimizer step 1
        zero gradients 1 shard
        gather parameters 1 over sharding by all-gather
        optimizer step 0
        zero gradients 0 shard
        gather parameters 0 over sharding by all-gather
        wait gather 1
        wait gather 0
        reduce loss over world
        """,
    )


def test_reduce_inside_frees_each_bucket_before_the_next_is_reduced():
    program = freed(sync_last_micro_batch(small_sharded(SLICES)))
    inside = """
        backward 1
        reduce gradients 0 sum over sharding by reduce-scatter during backward 1
        wait reduce 0 during backward 1
        accumulate shard 0 during backward 1
        free gradients 0 during backward 1
        reduce gradients 1 sum over sharding by reduce-scatter during backward 1
        wait reduce 1 during backward 1
        accumulate shard 1 during backward 1
        free gradients 1 during backward 1
        clip gradients of buckets 0,1 over sharding by 1/replicas
        """
    clip = "clip gradients of buckets 0,1 over sharding by 1/replicas"
    assert section(program, 0, "backward 1", clip) == lines_of(inside)
    # All storage is there already: with overlap the waits are as late, in front of the next reduction.
    assert section(overlap_reductions(program), 0, "backward 1", clip) == lines_of(inside)


def test_a_bucket_that_is_reduced_in_the_last_backward_is_allocated_in_the_first():
    program = freed(sync_last_micro_batch(small_sharded(SLICES)))
    assert section(program, 0, "backward 0", "forward 1") == lines_of(
        """
        backward 0
        allocate gradients 0 during backward 0
        allocate gradients 1 during backward 0
        forward 1
        """
    )


def test_reducing_every_micro_batch_gives_storage_back_before_the_next_bucket_takes_some():
    program = freed(small_sharded(SLICES))
    expected = """
        backward {0}
        allocate gradients 0 during backward {0}
        reduce gradients 0 sum over sharding by reduce-scatter during backward {0}
        wait reduce 0 during backward {0}
        accumulate shard 0 during backward {0}
        free gradients 0 during backward {0}
        allocate gradients 1 during backward {0}
        reduce gradients 1 sum over sharding by reduce-scatter during backward {0}
        wait reduce 1 during backward {0}
        accumulate shard 1 during backward {0}
        free gradients 1 during backward {0}
        """
    assert section(program, 0, "backward 0", "forward 1")[:-1] == lines_of(expected.format(0))
    assert section(program, 0, "backward 1", "free gradients 1 during backward 1") == lines_of(expected.format(1))


def test_overlap_lets_the_next_bucket_fill_while_one_is_on_its_way():
    program = overlap_reductions(freed(small_sharded(SLICES, replicas=2)))
    assert section(program, 0, "backward 0", "forward 1") == lines_of(
        """
        backward 0
        allocate gradients 0 during backward 0
        reduce gradients 0 sum over sharding by reduce-scatter during backward 0
        allocate gradients 1 during backward 0
        wait reduce 0 during backward 0
        reduce gradients 0 sum over dp during backward 0
        wait reduce 0 during backward 0
        accumulate shard 0 during backward 0
        free gradients 0 during backward 0
        reduce gradients 1 sum over sharding by reduce-scatter during backward 0
        wait reduce 1 during backward 0
        reduce gradients 1 sum over dp during backward 0
        wait reduce 1 during backward 0
        accumulate shard 1 during backward 0
        free gradients 1 during backward 0
        forward 1
        """
    )


def test_a_bucket_that_is_used_again_late_gets_its_first_gradient_and_its_storage_early():
    """The embedding, bucket 2, is the head as well."""
    program = overlap_reductions(freed(small_sharded(SLICES, layers=1, tied=True, micro_batches=1)))
    lines = [
        line for line in listing(program, 0) if line.startswith(("allocate gradients", "reduce", "free gradients"))
    ]
    assert [line.removesuffix(" during backward 0").split(" sum")[0] for line in lines[:-1]] == lines_of(
        """
        allocate gradients 2
        allocate gradients 0
        reduce gradients 0
        allocate gradients 1
        free gradients 0
        reduce gradients 1
        free gradients 1
        reduce gradients 2
        free gradients 2
        """
    )


def test_freeing_what_is_not_owned_keeps_nothing_of_it():
    program = freed(small_sharded(TENSORS, micro_batches=1))
    assert section(
        program, 0, "allocate gradients 1 during backward 0", "free gradients 1 during backward 0"
    ) == lines_of(
        """
        allocate gradients 1 during backward 0
        reduce gradients 1 sum over sharding by reduce during backward 0
        wait reduce 1 during backward 0
        free gradients 1 during backward 0
        """
    )


def test_overlap_starts_the_reduction_across_replicas_when_the_next_bucket_is_full():
    program = overlap_reductions(fold_scales(small_sharded(SLICES, replicas=2)))
    assert section(program, 0, "backward 0", "backward 1") == lines_of(
        """
        backward 0
        reduce gradients 0 sum over sharding by reduce-scatter during backward 0
        wait reduce 0 during backward 0
        reduce gradients 0 sum over dp during backward 0
        reduce gradients 1 sum over sharding by reduce-scatter during backward 0
        wait reduce 1 during backward 0
        reduce gradients 1 sum over dp during backward 0
        forward 1
        wait reduce 0
        accumulate shard 0
        zero gradients 0
        wait reduce 1
        accumulate shard 1
        zero gradients 1
        backward 1
        """
    )


def test_release_frees_shards_after_the_update_and_allocates_them_where_they_are_first_added_to():
    program = allocate_where_written(release_gradients(fold_scales(small_sharded(SLICES, shards=2))))
    scale = "by 1/replicas"
    assert_listing(
        program,
        0,
        f"""
        count tokens over sharding
        forward 0
        backward 0
        allocate gradients 0 during backward 0
        allocate gradients 1 during backward 0
        reduce gradients 0 sum over sharding by reduce-scatter
        wait reduce 0
        allocate gradients 0 shard
        accumulate shard 0
        zero gradients 0
        reduce gradients 1 sum over sharding by reduce-scatter
        wait reduce 1
        allocate gradients 1 shard
        accumulate shard 1
        zero gradients 1
        forward 1
        backward 1
        reduce gradients 0 sum over sharding by reduce-scatter
        wait reduce 0
        accumulate shard 0
        free gradients 0
        reduce gradients 1 sum over sharding by reduce-scatter
        wait reduce 1
        accumulate shard 1
        free gradients 1
        clip gradients of buckets 0,1 over sharding {scale}
        optimizer step 1 {scale}
        free gradients 1 shard
        gather parameters 1 over sharding by all-gather
        optimizer step 0 {scale}
        free gradients 0 shard
        gather parameters 0 over sharding by all-gather
        wait gather 1
        wait gather 0
        reduce loss over world
        """,
    )


def test_release_with_freeing_in_communication_allocates_each_shard_once():
    program = allocate_where_written(
        release_gradients(reduce_inside(free_in_communication(fold_scales(small_sharded(SLICES)))))
    )
    lines = listing(program, 0)
    assert [line for line in lines if line.startswith(("allocate", "free", "zero")) and "shard" in line] == [
        "allocate gradients 0 shard during backward 0",
        "allocate gradients 1 shard during backward 0",
        "free gradients 1 shard",
        "free gradients 0 shard",
    ]
    for bucket in range(2):
        allocation = lines.index(f"allocate gradients {bucket} shard during backward 0")
        assert lines[allocation + 1] == f"accumulate shard {bucket} during backward 0"


def test_sync_after_accumulation_runs_the_rounds_of_all_buckets_side_by_side():
    program = sync_after_accumulation(small_sharded(SLICES, replicas=2))
    clip = "clip gradients of buckets 0,1 over sharding"
    assert section(program, 0, "backward 1", clip) == lines_of(
        """
        backward 1
        reduce gradients 0 sum over sharding by reduce-scatter
        reduce gradients 1 sum over sharding by reduce-scatter
        wait reduce 0
        reduce gradients 0 sum over dp
        wait reduce 1
        reduce gradients 1 sum over dp
        wait reduce 0
        accumulate shard 0
        zero gradients 0
        wait reduce 1
        accumulate shard 1
        zero gradients 1
        scale gradients 0 by 1/replicas
        scale gradients 1 by 1/replicas
        clip gradients of buckets 0,1 over sharding
        """
    )
    assert "reduce" not in "\n".join(section(program, 0, "count tokens over dp+sharding", "backward 1"))


def test_sync_after_accumulation_clears_at_once_what_somebody_else_owns():
    program = step_in_place(sync_after_accumulation(small_sharded(TENSORS, replicas=2)))
    assert section(program, 0, "backward 1", "clip gradients of buckets 0 over sharding")[1:-1] == lines_of(
        """
        reduce gradients 0 sum over sharding by reduce
        reduce gradients 1 sum over sharding by reduce
        wait reduce 0
        reduce gradients 0 sum over dp
        wait reduce 1
        zero gradients 1
        wait reduce 0
        scale gradients 0 by 1/replicas
        """
    )


def test_the_average_of_averages_is_the_average_over_all_replicas():
    program = average_in_collective(small_sharded(SLICES, replicas=2, micro_batches=1))
    lines = listing(program, 0)
    assert [line for line in lines if line.startswith("reduce gradients")] == [
        "reduce gradients 0 avg over sharding by reduce-scatter",
        "reduce gradients 0 avg over dp",
        "reduce gradients 1 avg over sharding by reduce-scatter",
        "reduce gradients 1 avg over dp",
    ]
    assert not any(line.startswith("scale gradients") for line in lines)


def test_an_average_is_sent_to_owners_who_alone_would_have_divided():
    program = average_in_collective(small_sharded(TENSORS, micro_batches=1))
    for rank in range(2):
        text = "\n".join(listing(program, rank))
        assert text.count("avg over sharding by reduce") == 2
        assert "scale gradients" not in text


def test_copies_of_a_tied_parameter_are_summed_by_the_owners_of_the_same_part():
    by_slices = sum_tied_gradients(small_sharded(SLICES, stages=2, tied=True, micro_batches=1))
    for rank, copy in enumerate([0, 0, 1, 1]):
        lines = listing(by_slices, rank)
        sum_of_copies = lines.index(f"reduce replicated {copy} sum over tied:0,1 (embedding)")
        assert lines[sum_of_copies + 1].startswith("clip gradients")
    by_tensors = sum_tied_gradients(small_sharded(TENSORS, stages=2, tied=True, micro_batches=1))
    owners = {bucket.id: bucket.owner for bucket in by_tensors.layout.buckets}
    assert owners == {0: 0, 1: 0}
    sums = [[line for line in listing(by_tensors, rank) if "replicated" in line] for rank in range(4)]
    assert sums == [
        ["reduce replicated 0 sum over tied:0,1 (embedding)"],
        [],
        ["reduce replicated 1 sum over tied:0,1 (embedding)"],
        [],
    ]
    clips = [next(line for line in listing(by_tensors, rank) if "clip" in line) for rank in range(4)]
    assert clips == [
        "clip gradients of buckets 0 over pp+sharding",
        *["clip gradients of buckets none over pp+sharding"] * 3,
    ]


def test_only_owners_scale_down():
    program = scale_losses_up(token_mean(small_sharded(TENSORS, micro_batches=1)))
    for rank in range(2):
        lines = listing(program, rank)
        assert [line for line in lines if line.endswith("by 1/loss_scale")] == [
            f"scale gradients {rank} by 1/loss_scale"
        ]
        assert lines[lines.index("check finite") - 1].startswith("clip gradients")
