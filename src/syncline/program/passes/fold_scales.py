"""All scales of a gradient that is not written any more become one multiplication, where it costs no pass over memory.

Scaling is linear, so what stands behind a bucket's last reduction may as well be done earlier or later: in the seed of
the backward when losses are scaled there anyway, otherwise (`enable_delay_scale_loss`, or a loss scale to be undone) in
the optimizer's fused kernel.
In the latter case the norm is computed on the unscaled gradients and multiplied by the same factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from syncline.program.actions import Action, ClipGradients, OptimizerStep, ScaleGradients, ScaleLoss
from syncline.program.passes.delay_loss_scale import shared_part
from syncline.program.passes.positions import final
from syncline.program.program import Program
from syncline.program.scales import ONE, Factor


def fold_scales(program: Program) -> Program:
    factors = {
        factor for rank, actions in enumerate(program.ranks) for factor in _final_factors(program, rank, actions)
    }
    if len(factors) != 1:  # One norm has one factor: nothing common to fold.
        return program
    (factor,) = factors
    into_loss = "loss_scale" not in dict(factor.powers) and any(
        shared_part(action.scale) for actions in program.ranks for action in actions if isinstance(action, ScaleLoss)
    )
    fold = _into_loss if into_loss else _into_optimizer

    def change(rank: int, actions: Sequence[Action]) -> list[Action]:
        return [
            fold(action, factor)
            for action, is_final in zip(actions, final(program, actions), strict=True)
            if not (is_final and isinstance(action, ScaleGradients))
        ]

    return program.map_ranks(change)


def _final_factors(program: Program, rank: int, actions: Sequence[Action]) -> list[Factor]:
    """For each bucket of which the rank owns something, the product of the scales behind its last backward."""
    factors = {bucket.id: ONE for bucket in program.buckets(rank) if program.owns(rank, bucket.id)}
    for action, is_final in zip(actions, final(program, actions), strict=True):
        if is_final and isinstance(action, ScaleGradients):
            factors[action.bucket] *= action.scale
    return list(factors.values())


def _into_loss(action: Action, factor: Factor) -> Action:
    return replace(action, scale=action.scale * factor) if isinstance(action, ScaleLoss) else action


def _into_optimizer(action: Action, factor: Factor) -> Action:
    return (
        replace(action, scale=action.scale * factor) if isinstance(action, (ClipGradients, OptimizerStep)) else action
    )
