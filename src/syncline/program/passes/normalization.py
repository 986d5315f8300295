"""What the sum of token losses is divided by.

Both passes scale the seed of every backward, so that gradients arrive with their final size; `delay_loss_scale` moves
what is common to all micro-batches to the gradients. Reductions average over replicas, hence the factor `replicas`
where a sum is meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from syncline.program.actions import Action, Forward, ReduceLoss, ScaleLoss
from syncline.program.program import Program
from syncline.program.scales import Factor


def token_mean(program: Program) -> Program:
    """Every valid token of the global batch counts alike, on whatever rank and in whatever micro-batch it is."""
    replicas = 1 if program.topology.replicas > 1 else 0
    return _scale_losses(program, Factor.of(replicas=replicas, tokens=-1), Factor.of(tokens=-1))


def micro_batch_mean(program: Program) -> Program:
    """Every micro-batch counts alike, whatever its number of valid tokens."""
    replicas = -1 if program.topology.replicas > 1 else 0
    accumulation = -1 if program.micro_batches > 1 else 0
    scale = Factor.of(micro_batch_tokens=-1, accumulation=accumulation)
    return _scale_losses(program, scale, scale * Factor.of(replicas=replicas))


def _scale_losses(program: Program, scale: Factor, target: Factor) -> Program:
    def change(rank: int, actions: Sequence[Action]) -> list[Action]:
        changed: list[Action] = []
        for action in actions:
            if isinstance(action, ReduceLoss):
                action = replace(action, scale=target)
            changed.append(action)
            if isinstance(action, Forward) and action.stage == program.last_stage:
                changed.append(ScaleLoss(action.stage, action.micro_batch, scale))
        return changed

    return replace(program.map_ranks(change), target=target)
