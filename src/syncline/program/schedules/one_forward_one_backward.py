"""1F1B: after a warm-up every stage alternates, so that it holds at most `stages - stage` micro-batches of activations.

Source: PipeDream-Flush, Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (2021), section 2.2.
"""

from __future__ import annotations

from syncline.program.actions import Backward, Forward


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Forward | Backward]:
    warm_up = min(stages - stage - 1, micro_batches)
    order: list[Forward | Backward] = [Forward(stage, index) for index in range(warm_up)]
    for index in range(warm_up, micro_batches):
        order += [Forward(stage, index), Backward(stage, index - warm_up)]
    order += [Backward(stage, index) for index in range(micro_batches - warm_up, micro_batches)]
    return order
