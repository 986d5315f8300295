"""What a rank of a pipeline keeps of what it computes, and for how long."""

from __future__ import annotations

import pytest
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from syncline.program.actions import COMPUTATIONS, Action
from tests.runtime.pipelines import start_forwards_first, step

pytestmark = pytest.mark.ranks

K = 6


def outputs_alive_on_rank(rank: int, world_size: int) -> list[int]:
    """After each computation of how many forwards the output is still in memory: on the first stage the hidden states,
    on the last one the logits.
    """
    engine = start_forwards_first(rank, K)
    outputs: list[StorageWeakRef] = []
    alive: list[int] = []
    (stage,) = engine.stages

    def keep_watch(module: object, inputs: object, output: Tensor) -> None:
        outputs.append(StorageWeakRef(output.untyped_storage()))

    def after(action: Action) -> None:
        if isinstance(action, COMPUTATIONS):
            alive.append(sum(not output.expired() for output in outputs))

    watched = stage.model.get_output_embeddings() if stage.is_last else stage
    watched.register_forward_hook(keep_watch)
    step(engine, after)
    assert len(outputs) == K
    return alive


def test_outputs_go_once_they_are_sent_and_logits_with_their_backward(pool):
    """All forwards come first. Of hidden states two messages may be on their way, and one has just been computed;
    logits are what the backward of the loss reads.
    """
    hidden, logits = pool.run(2, outputs_alive_on_rank)
    assert hidden == [1, 2, *[3] * (K - 2), *[2] * K]
    assert logits == [*range(1, K + 1), *reversed(range(K))]
