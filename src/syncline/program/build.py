"""Strategy and layout in, program out: which passes an option needs, and in which order they run."""

from __future__ import annotations

from collections.abc import Callable

from syncline.program.analysis.costs import with_peaks
from syncline.program.layout import ParameterLayout
from syncline.program.naive import forward_program, naive_program
from syncline.program.passes.allocation import allocate_where_written
from syncline.program.passes.average import average_in_collective
from syncline.program.passes.bubbles import mark_bubbles
from syncline.program.passes.delay_loss_scale import delay_loss_scale
from syncline.program.passes.divide_parameters import gather_around_use
from syncline.program.passes.fold_scales import fold_scales
from syncline.program.passes.free_in_comm import free_in_communication, reduce_inside
from syncline.program.passes.gather_overlap import gather_behind_forward
from syncline.program.passes.loss_scaling import scale_losses_up
from syncline.program.passes.normalization import micro_batch_mean, token_mean
from syncline.program.passes.offload import offload_activations
from syncline.program.passes.overlap import overlap_reductions
from syncline.program.passes.receive_ahead import receive_ahead
from syncline.program.passes.release import release_gradients
from syncline.program.passes.sharding import shard_updates, step_in_place
from syncline.program.passes.sync_moment import sync_after_accumulation, sync_last_micro_batch
from syncline.program.passes.tied_weights import sum_tied_gradients
from syncline.program.program import Program, Sizes
from syncline.schedules import schedule_named
from syncline.strategy import Normalization, Strategy, SyncMoment

Pass = Callable[[Program], Program]

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def build_program(strategy: Strategy, layout: ParameterLayout, *, activation_bytes: int) -> Program:
    """The program of one optimizer step on every rank.

    `activation_bytes` is the size of one micro-batch's hidden states between two stages.
    """
    sizes = sizes_of(strategy, activation_bytes)
    schedule = schedule_named(strategy.schedule, strategy.most_activations)
    program = naive_program(strategy.topology, strategy.placement, layout, strategy.micro_batches, schedule, sizes)
    for step in passes(strategy):
        program = step(program)
    return with_peaks(program)


def build_forward_program(
    strategy: Strategy, layout: ParameterLayout, micro_batches: int, *, activation_bytes: int
) -> Program:
    """The program of `micro_batches` forwards through all stages, without an update."""
    sizes = sizes_of(strategy, activation_bytes)
    program = forward_program(strategy.topology, strategy.placement, layout, micro_batches, sizes)
    return with_peaks(gather_around_use(program) if strategy.divides_parameters else program)


def sizes_of(strategy: Strategy, activation_bytes: int) -> Sizes:
    return Sizes(
        gradient_itemsize=ITEMSIZE[strategy.gradient_dtype],
        reduce_itemsize=ITEMSIZE[strategy.reduce_dtype],
        parameter_itemsize=ITEMSIZE[strategy.parameter_dtype],
        activation_bytes=activation_bytes,
    )


def passes(strategy: Strategy) -> list[Pass]:
    """The passes of a strategy in their order.

    First what every gradient is worth, who updates it, and when it is reduced; then scales are folded, so that no scale
    stands between a reduction and the place to which the overlap moves its wait; then the storage, which depends on all
    that reads it, and with it the overlap; last the parameters, and what the
    order leaves unused.
    """
    divides = strategy.shards > 1
    frees = strategy.frees_reduced_gradients
    every_micro_batch = strategy.sync is SyncMoment.EVERY_MICRO_BATCH and strategy.micro_batches > 1
    after_accumulation = strategy.sync is SyncMoment.AFTER_ACCUMULATION
    assert not (strategy.overlap and after_accumulation), "nothing is left to overlap with"
    normalization = {Normalization.TOKENS: token_mean, Normalization.MICRO_BATCH_MEAN: micro_batch_mean}
    moments: dict[SyncMoment, list[Pass]] = {
        SyncMoment.EVERY_MICRO_BATCH: [],
        SyncMoment.LAST_MICRO_BATCH: [sync_last_micro_batch],
        SyncMoment.AFTER_ACCUMULATION: [sync_after_accumulation],
    }
    choices: list[tuple[bool, Pass]] = [
        (strategy.receive_ahead, receive_ahead),
        (True, normalization[strategy.normalization]),
        (divides, shard_updates),
        *((True, moment) for moment in moments[strategy.sync]),
        (strategy.average_in_collective, average_in_collective),
        (True, sum_tied_gradients),
        (strategy.scales_loss, scale_losses_up),
        (strategy.delay_loss_scale, delay_loss_scale),
        (True, fold_scales),
        (divides and not frees and not every_micro_batch, step_in_place),
        (frees, free_in_communication),
        (frees and not after_accumulation, reduce_inside),
        (strategy.release_gradients, release_gradients),
        (True, allocate_where_written),
        (strategy.overlap, overlap_reductions),
        (divides and strategy.overlap_gathers and not strategy.divides_parameters, gather_behind_forward),
        (strategy.divides_parameters, gather_around_use),
        (strategy.offload_activations, offload_activations),
        (strategy.topology.pp > 1, mark_bubbles),
    ]
    return [chosen for applies, chosen in choices if applies]
