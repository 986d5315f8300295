"""`enable_delay_scale_loss`: the part of the loss's scale that all micro-batches share joins the gradients' scale.

Losses are then seeded with 1 (or with what only their own micro-batch knows), and each bucket is multiplied once, after
its last reduction. Every stage gets the same factor, since every stage's gradients descend from the same seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from syncline.program.actions import Action, ClipGradients, ScaleGradients, ScaleLoss
from syncline.program.program import Program
from syncline.program.scales import Factor

OF_THE_BACKWARD = ("micro_batch_tokens", "loss_scale")
"""What only one micro-batch knows, and what must act before the backward."""


def delay_loss_scale(program: Program) -> Program:
    scales = {action.scale for actions in program.ranks for action in actions if isinstance(action, ScaleLoss)}
    assert len(scales) == 1, f"losses are scaled by different factors: {scales}"
    (scale,) = scales
    shared = shared_part(scale)
    own = Factor(tuple(power for power in scale.powers if power not in shared.powers))

    def change(rank: int, actions: Sequence[Action]) -> list[Action]:
        changed: list[Action] = []
        for action in actions:
            if isinstance(action, ScaleLoss):
                if own:
                    changed.append(replace(action, scale=own))
                continue
            if isinstance(action, ClipGradients) and shared:
                changed += [
                    ScaleGradients(bucket.id, shared)
                    for bucket in program.buckets(rank)
                    if program.owns(rank, bucket.id)
                ]
            changed.append(action)
        return changed

    return program.map_ranks(change)


def shared_part(scale: Factor) -> Factor:
    """What may as well act after the backward, on all micro-batches together."""
    return Factor(tuple(power for power in scale.powers if power[0] not in OF_THE_BACKWARD))
