"""Strategy and layout in, program out: which passes an option needs, and in which order they run."""

from __future__ import annotations

from collections.abc import Callable

from syncline.program.costs import with_peaks
from syncline.program.layout import ParameterLayout
from syncline.program.passes.average import average_in_collective
from syncline.program.passes.delay_loss_scale import delay_loss_scale
from syncline.program.passes.fold_scales import fold_scales
from syncline.program.passes.normalization import micro_batch_mean, token_mean
from syncline.program.passes.overlap import overlap_reductions
from syncline.program.passes.release import release_gradients
from syncline.program.passes.sync_moment import sync_after_accumulation, sync_last_micro_batch
from syncline.program.passes.tied_weights import sum_tied_gradients
from syncline.program.program import Program, Sizes
from syncline.program.schedules import SCHEDULES
from syncline.program.schedules.naive import naive_program
from syncline.strategy import Normalization, Strategy, SyncMoment

Pass = Callable[[Program], Program]

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2}


def build_program(strategy: Strategy, layout: ParameterLayout, *, activation_bytes: int) -> Program:
    """The program of one optimizer step on every rank.

    `activation_bytes` is the size of one micro-batch's hidden states between two stages.
    """
    sizes = Sizes(ITEMSIZE[strategy.gradient_dtype], ITEMSIZE[strategy.reduce_dtype], activation_bytes)
    schedule = SCHEDULES[strategy.schedule]
    program = naive_program(strategy.topology, layout, strategy.micro_batches, schedule, sizes)
    for step in passes(strategy):
        program = step(program)
    return with_peaks(program)


def passes(strategy: Strategy) -> list[Pass]:
    """The passes of a strategy in their order.

    First what every gradient is worth, then when it is reduced; then scales are folded, so that no scale stands between
    a reduction and the place to which the overlap moves its wait; last the storage, which depends on all that reads it.
    """
    assert not (strategy.overlap and strategy.sync is SyncMoment.AFTER_ACCUMULATION), "nothing is left to overlap with"
    normalization = {Normalization.TOKENS: token_mean, Normalization.MICRO_BATCH_MEAN: micro_batch_mean}
    moments = {
        SyncMoment.LAST_MICRO_BATCH: sync_last_micro_batch,
        SyncMoment.AFTER_ACCUMULATION: sync_after_accumulation,
    }
    chosen: list[Pass] = [normalization[strategy.normalization]]
    if strategy.sync in moments:
        chosen.append(moments[strategy.sync])
    if strategy.average_in_collective:
        chosen.append(average_in_collective)
    chosen.append(sum_tied_gradients)
    if strategy.delay_loss_scale:
        chosen.append(delay_loss_scale)
    chosen.append(fold_scales)
    if strategy.overlap:
        chosen.append(overlap_reductions)
    if strategy.release_gradients:
        chosen.append(release_gradients)
    return chosen
