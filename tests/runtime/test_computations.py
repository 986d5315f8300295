"""What a rank of a pipeline keeps of what it computes, and for how long."""

from __future__ import annotations

import pytest
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from syncline.arguments import arguments_from_mapping
from syncline.engine import start_engine
from syncline.job import describe_job
from syncline.program.actions import COMPUTATIONS, Action
from syncline.verification.batches import ROWS, SEQUENCE, hard_global_batch
from tests.stand_ins import CPU

pytestmark = pytest.mark.ranks

K = 6
VOCABULARY = 64


def outputs_alive_on_rank(rank: int, world_size: int) -> list[int]:
    """After each computation of how many forwards the output is still in memory: on the first stage the hidden states,
    on the last one the logits.
    """
    job = describe_job(
        arguments_from_mapping(
            {
                "model_config": {
                    "model_type": "llama",
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "hidden_size": 16,
                    "vocab_size": VOCABULARY,
                },
                "nproc_per_node": 2,
                "pipeline_parallel_degree": 2,
                "pipeline_schedule_mode": "FThenB",
                "gradient_accumulation_steps": K,
                "per_device_train_batch_size": ROWS,
                "max_seq_length": SEQUENCE,
            }
        )
    )
    engine = start_engine(job, rank, CPU)
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
    batch = hard_global_batch(5, 0, 1, K, VOCABULARY)
    engine.worker.step([batch[0, index] for index in range(K)], 1e-2, after)
    assert len(outputs) == K
    return alive


def test_outputs_go_once_they_are_sent_and_logits_with_their_backward(pool):
    """All forwards come first. Of hidden states two messages may be on their way, and one has just been computed;
    logits are what the backward of the loss reads.
    """
    hidden, logits = pool.run(2, outputs_alive_on_rank)
    assert hidden == [1, 2, *[3] * (K - 2), *[2] * K]
    assert logits == [*range(1, K + 1), *reversed(range(K))]
