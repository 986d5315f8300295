"""A golden test per pass: the program before and after, as text."""

from __future__ import annotations

import pytest

from syncline.program.display.text import listing
from syncline.program.passes.allocation import allocate_where_written
from syncline.program.passes.average import average_in_collective
from syncline.program.passes.delay_loss_scale import delay_loss_scale
from syncline.program.passes.fold_scales import fold_scales
from syncline.program.passes.loss_scaling import scale_losses_up
from syncline.program.passes.normalization import micro_batch_mean, token_mean
from syncline.program.passes.overlap import overlap_reductions
from syncline.program.passes.release import release_gradients
from syncline.program.passes.sync_moment import sync_after_accumulation, sync_last_micro_batch
from syncline.program.passes.tied_weights import sum_tied_gradients
from tests.program.examples import small_naive, small_scaled
from tests.program.listings import assert_listing


def test_naive_step_reduces_every_bucket_after_every_backward():
    program = small_naive(replicas=2)
    expected = """
        count tokens over dp
        forward 0
        backward 0
        reduce gradients 0 sum over dp
        wait reduce 0
        scale gradients 0 by 1/replicas
        reduce gradients 1 sum over dp
        wait reduce 1
        scale gradients 1 by 1/replicas
        forward 1
        backward 1
        reduce gradients 0 sum over dp
        wait reduce 0
        scale gradients 0 by 1/replicas
        reduce gradients 1 sum over dp
        wait reduce 1
        scale gradients 1 by 1/replicas
        clip gradients of buckets 0,1 over pp
        optimizer step 0
        zero gradients 0
        optimizer step 1
        zero gradients 1
        reduce loss over world
        """
    assert_listing(program, 0, expected)
    assert_listing(program, 1, expected)


def test_naive_pipeline_step_follows_its_schedule():
    program = small_naive(stages=2)
    assert_listing(
        program,
        0,
        """
        count tokens over dp
        forward 0
        send activation 0 to rank 1
        forward 1
        send activation 1 to rank 1
        receive gradient 0 from rank 1
        backward 0
        receive gradient 1 from rank 1
        backward 1
        clip gradients of buckets 0 over pp
        optimizer step 0
        zero gradients 0
        reduce loss over world
        """,
    )
    assert_listing(
        program,
        1,
        """
        count tokens over dp
        receive activation 0 from rank 0
        forward 0
        backward 0
        send gradient 0 to rank 0
        receive activation 1 from rank 0
        forward 1
        backward 1
        send gradient 1 to rank 0
        clip gradients of buckets 1 over pp
        optimizer step 1
        zero gradients 1
        reduce loss over world
        """,
    )


def test_token_mean_seeds_every_backward_of_the_last_stage():
    program = token_mean(small_naive(stages=2, replicas=2, micro_batches=1))
    assert "scale loss" not in "\n".join(listing(program, 0))
    last = listing(program, 2)
    assert last[2:5] == ["forward 0", "scale loss 0 by replicas/tokens", "backward 0"]
    assert last[-1] == "reduce loss over world by 1/tokens"
    assert str(program.target) == "1/tokens"


def test_token_mean_without_replicas_has_no_replicas_to_make_up_for():
    assert "scale loss 0 by 1/tokens" in listing(token_mean(small_naive()), 0)


def test_micro_batch_mean():
    program = micro_batch_mean(small_naive(replicas=2))
    assert "scale loss 1 by 1/(micro_batch_tokens*accumulation)" in listing(program, 1)
    assert str(program.target) == "1/(micro_batch_tokens*accumulation*replicas)"


def test_average_in_collective_replaces_sum_and_division():
    program = average_in_collective(small_naive(replicas=2, micro_batches=1))
    assert_listing(
        program,
        0,
        """
        count tokens over dp
        forward 0
        backward 0
        reduce gradients 0 avg over dp
        wait reduce 0
        reduce gradients 1 avg over dp
        wait reduce 1
        clip gradients of buckets 0,1 over pp
        optimizer step 0
        zero gradients 0
        optimizer step 1
        zero gradients 1
        reduce loss over world
        """,
    )


def test_average_refuses_a_sum_that_nobody_divides():
    undivided = small_naive(replicas=2).map_ranks(lambda _, actions: [a for a in actions if "Scale" not in str(a)])
    with pytest.raises(AssertionError, match="without dividing"):
        average_in_collective(undivided)


def test_sync_last_micro_batch_keeps_the_last_reductions():
    program = sync_last_micro_batch(small_naive(replicas=2, micro_batches=3))
    assert_listing(
        program,
        0,
        """
        count tokens over dp
        forward 0
        backward 0
        forward 1
        backward 1
        forward 2
        backward 2
        reduce gradients 0 sum over dp
        wait reduce 0
        scale gradients 0 by 1/replicas
        reduce gradients 1 sum over dp
        wait reduce 1
        scale gradients 1 by 1/replicas
        clip gradients of buckets 0,1 over pp
        optimizer step 0
        zero gradients 0
        optimizer step 1
        zero gradients 1
        reduce loss over world
        """,
    )


def test_sync_after_accumulation_moves_reductions_to_the_head_of_the_optimizer_phase():
    program = sync_after_accumulation(small_naive(stages=2, replicas=2, micro_batches=2))
    assert_listing(
        program,
        3,
        """
        count tokens over dp
        receive activation 0 from rank 1
        forward 0
        backward 0
        send gradient 0 to rank 1
        receive activation 1 from rank 1
        forward 1
        backward 1
        send gradient 1 to rank 1
        reduce gradients 1 sum over dp
        wait reduce 1
        scale gradients 1 by 1/replicas
        clip gradients of buckets 1 over pp
        optimizer step 1
        zero gradients 1
        reduce loss over world
        """,
    )
    flat = sync_after_accumulation(small_naive(replicas=2, micro_batches=1))
    assert listing(flat, 0)[3:7] == [
        "reduce gradients 0 sum over dp",
        "reduce gradients 1 sum over dp",
        "wait reduce 0",
        "scale gradients 0 by 1/replicas",
    ]


def test_delay_loss_scale_moves_the_shared_scale_to_the_gradients():
    program = delay_loss_scale(token_mean(small_naive(replicas=2, micro_batches=1)))
    assert_listing(
        program,
        1,
        """
        count tokens over dp
        forward 0
        backward 0
        reduce gradients 0 sum over dp
        wait reduce 0
        scale gradients 0 by 1/replicas
        reduce gradients 1 sum over dp
        wait reduce 1
        scale gradients 1 by 1/replicas
        scale gradients 0 by replicas/tokens
        scale gradients 1 by replicas/tokens
        clip gradients of buckets 0,1 over pp
        optimizer step 0
        zero gradients 0
        optimizer step 1
        zero gradients 1
        reduce loss over world by 1/tokens
        """,
    )


def test_delay_loss_scale_gives_every_stage_the_same_factor():
    program = delay_loss_scale(token_mean(small_naive(stages=2)))
    assert "scale gradients 0 by 1/tokens" in listing(program, 0)
    assert "scale gradients 1 by 1/tokens" in listing(program, 1)


def test_delay_loss_scale_leaves_what_only_the_micro_batch_knows():
    program = delay_loss_scale(micro_batch_mean(small_naive()))
    assert "scale loss 0 by 1/micro_batch_tokens" in listing(program, 0)
    assert "scale gradients 1 by 1/accumulation" in listing(program, 0)


def test_fold_scales_into_the_seed_of_the_backward():
    program = fold_scales(sync_last_micro_batch(token_mean(small_naive(replicas=2, micro_batches=1))))
    assert_listing(
        program,
        0,
        """
        count tokens over dp
        forward 0
        scale loss 0 by 1/tokens
        backward 0
        reduce gradients 0 sum over dp
        wait reduce 0
        reduce gradients 1 sum over dp
        wait reduce 1
        clip gradients of buckets 0,1 over pp
        optimizer step 0
        zero gradients 0
        optimizer step 1
        zero gradients 1
        reduce loss over world by 1/tokens
        """,
    )


def test_fold_scales_into_the_optimizer_when_the_loss_is_not_scaled():
    program = fold_scales(delay_loss_scale(sync_last_micro_batch(token_mean(small_naive(replicas=2, micro_batches=1)))))
    assert_listing(
        program,
        0,
        """
        count tokens over dp
        forward 0
        backward 0
        reduce gradients 0 sum over dp
        wait reduce 0
        reduce gradients 1 sum over dp
        wait reduce 1
        clip gradients of buckets 0,1 over pp by 1/tokens
        optimizer step 0 by 1/tokens
        zero gradients 0
        optimizer step 1 by 1/tokens
        zero gradients 1
        reduce loss over world by 1/tokens
        """,
    )


def test_fold_scales_keeps_the_divisions_between_micro_batches():
    program = fold_scales(token_mean(small_naive(replicas=2)))
    lines = listing(program, 0)
    assert lines.count("scale gradients 0 by 1/replicas") == 1
    assert lines.index("scale gradients 0 by 1/replicas") < lines.index("forward 1")
    assert "scale loss 1 by 1/tokens" in lines


def test_overlap_starts_reductions_inside_the_backward_and_waits_late():
    program = overlap_reductions(fold_scales(sync_last_micro_batch(token_mean(small_naive(replicas=2)))))
    assert_listing(
        program,
        0,
        """
        count tokens over dp
        forward 0
        scale loss 0 by 1/tokens
        backward 0
        forward 1
        scale loss 1 by 1/tokens
        backward 1
        reduce gradients 0 sum over dp during backward 1
        reduce gradients 1 sum over dp during backward 1
        wait reduce 0
        wait reduce 1
        clip gradients of buckets 0,1 over pp
        optimizer step 0
        zero gradients 0
        optimizer step 1
        zero gradients 1
        reduce loss over world by 1/tokens
        """,
    )


def test_overlap_waits_before_the_next_backward_writes():
    program = overlap_reductions(average_in_collective(small_naive(replicas=2)))
    lines = listing(program, 0)
    assert lines[3:9] == [
        "reduce gradients 0 avg over dp during backward 0",
        "reduce gradients 1 avg over dp during backward 0",
        "forward 1",
        "wait reduce 0",
        "wait reduce 1",
        "backward 1",
    ]


def test_overlap_scales_only_after_the_wait():
    lines = listing(overlap_reductions(small_naive(replicas=2)), 0)
    assert lines[5:10] == [
        "forward 1",
        "wait reduce 0",
        "scale gradients 0 by 1/replicas",
        "wait reduce 1",
        "scale gradients 1 by 1/replicas",
    ]


def test_release_allocates_at_the_first_gradient_and_frees_after_the_update():
    program = allocate_where_written(release_gradients(small_naive()))
    assert_listing(
        program,
        0,
        """
        count tokens over dp
        forward 0
        backward 0
        allocate gradients 0 during backward 0
        allocate gradients 1 during backward 0
        forward 1
        backward 1
        clip gradients of buckets 0,1 over pp
        optimizer step 0
        free gradients 0
        optimizer step 1
        free gradients 1
        reduce loss over world
        """,
    )


def test_tied_gradients_are_summed_on_every_stage_that_holds_a_copy():
    program = sum_tied_gradients(small_naive(stages=3, micro_batches=1, tied=True))
    assert "reduce replicated 0 sum over tied:0,2 (embedding)" in listing(program, 0)
    assert "reduce replicated" not in "\n".join(listing(program, 1))
    assert "reduce replicated 1 sum over tied:0,2 (embedding)" in listing(program, 2)


def test_a_tied_parameter_is_counted_once_in_the_norm():
    program = small_scaled(stages=2, tied=True)
    assert "clip gradients of buckets 0 over pp" in listing(program, 0)
    assert "clip gradients of buckets none over pp" in listing(program, 1)


def test_scale_losses_up_scales_gradients_down_and_checks_the_norm():
    before = sync_last_micro_batch(token_mean(small_naive(replicas=2, micro_batches=1)))
    assert_listing(
        scale_losses_up(before),
        0,
        """
        count tokens over dp
        forward 0
        scale loss 0 by loss_scale*replicas/tokens
        backward 0
        reduce gradients 0 sum over dp
        wait reduce 0
        scale gradients 0 by 1/replicas
        reduce gradients 1 sum over dp
        wait reduce 1
        scale gradients 1 by 1/replicas
        scale gradients 0 by 1/loss_scale
        scale gradients 1 by 1/loss_scale
        clip gradients of buckets 0,1 over pp
        check finite
        optimizer step 0
        zero gradients 0
        optimizer step 1
        zero gradients 1
        reduce loss over world by 1/tokens
        """,
    )


@pytest.mark.parametrize(
    ("passes", "loss", "gradients"),
    [
        ((), "loss_scale*replicas/tokens", "1/(loss_scale*replicas)"),
        ((delay_loss_scale,), "loss_scale", "1/(loss_scale*tokens)"),
    ],
    ids=["scaled loss", "delayed scale"],
)
def test_the_loss_scale_is_undone_in_the_optimizer_and_never_in_the_loss(passes, loss, gradients):
    program = scale_losses_up(sync_last_micro_batch(token_mean(small_naive(replicas=2, micro_batches=1))))
    for step in passes:
        program = step(program)
    assert_listing(
        fold_scales(program),
        1,
        f"""
        count tokens over dp
        forward 0
        scale loss 0 by {loss}
        backward 0
        reduce gradients 0 sum over dp
        wait reduce 0
        reduce gradients 1 sum over dp
        wait reduce 1
        clip gradients of buckets 0,1 over pp by {gradients}
        check finite
        optimizer step 0 by {gradients}
        zero gradients 0
        optimizer step 1 by {gradients}
        zero gradients 1
        reduce loss over world by 1/tokens
        """,
    )
