"""FThenB: all forwards, then all backwards; the activations of every micro-batch are held at once.

Source: GPipe, Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (2019),
section 2.3.
"""

from __future__ import annotations

from syncline.program.actions import Backward, Forward


def forward_then_backward(stage: int, stages: int, micro_batches: int) -> list[Forward | Backward]:
    if stages == 1:
        # Nothing waits for the forwards of a lone stage: holding all activations would buy nothing.
        return [kind(stage, index) for index in range(micro_batches) for kind in (Forward, Backward)]
    return [kind(stage, index) for kind in (Forward, Backward) for index in range(micro_batches)]
