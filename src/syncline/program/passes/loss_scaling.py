"""float16: losses are scaled up before the backward and gradients down after it, and an overflow stops the update.

Source: Micikevicius et al., "Mixed Precision Training" (2018), section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from syncline.program.actions import Action, CheckFinite, ClipGradients, ScaleGradients, ScaleLoss
from syncline.program.program import Program
from syncline.program.scales import Factor

UP, DOWN = Factor.of(loss_scale=1), Factor.of(loss_scale=-1)


def scale_losses_up(program: Program) -> Program:
    """Every loss has its scale by now; that part of it which cancels out again stays with the loss."""

    def change(rank: int, actions: Sequence[Action]) -> list[Action]:
        changed: list[Action] = []
        for action in actions:
            if isinstance(action, ScaleLoss):
                action = replace(action, scale=action.scale * UP)
            if isinstance(action, ClipGradients):
                owned = (bucket.id for bucket in program.buckets(rank) if program.owns(rank, bucket.id))
                changed += [*(ScaleGradients(bucket, DOWN) for bucket in owned), action, CheckFinite()]
            else:
                changed.append(action)
        return changed

    return program.map_ranks(change)
