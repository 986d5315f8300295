"""A small pipeline in which all forwards come first, so that every activation has to wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from syncline.arguments import arguments_from_mapping
from syncline.program.actions import Action
from syncline.runtime.worker import StepResult
from syncline.training.engine import Engine, start_engine
from syncline.training.job import describe_job
from syncline.verification.batches import ROWS, SEQUENCE, hard_global_batch
from tests.stand_ins import CPU

VOCABULARY = 64


def start_forwards_first(rank: int, micro_batches: int, **keys: Any) -> Engine:
    """One of its two ranks."""
    model = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 16,
        "vocab_size": VOCABULARY,
    }
    arguments = arguments_from_mapping(
        {
            "model_config": model,
            "nproc_per_node": 2,
            "pipeline_parallel_degree": 2,
            "pipeline_schedule_mode": "FThenB",
            "gradient_accumulation_steps": micro_batches,
            "per_device_train_batch_size": ROWS,
            "max_seq_length": SEQUENCE,
            **keys,
        }
    )
    return start_engine(describe_job(arguments), rank, CPU)


def step(engine: Engine, after: Callable[[Action], None]) -> StepResult:
    """One step; `after` is called with every action."""
    micro_batches = engine.worker.program.micro_batches
    batch = hard_global_batch(5, 0, 1, micro_batches, VOCABULARY)
    return engine.worker.step([batch[0, index] for index in range(micro_batches)], 1e-2, after)
