"""Halved backwards on one rank, where nothing waits for anybody: bit by bit what whole ones compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from syncline.arguments import arguments_from_mapping
from syncline.strategy.resolve import resolve_strategy
from syncline.training.engine import Engine, start_engine
from syncline.training.job import describe_job
from syncline.verification.batches import ROWS, SEQUENCE, hard_global_batch
from tests.stand_ins import CPU

VOCABULARY = 128
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2, with biases": {"model_type": "qwen2"},
    "mixtral, with experts": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}
SIZES = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "vocab_size": VOCABULARY,
}


def trained(schedule: str, model: str, **keys: Any) -> tuple[Engine, dict[str, Tensor], list[int]]:
    arguments = arguments_from_mapping(
        {
            "model_config": {**SIZES, **MODELS[model]},
            "gradient_accumulation_steps": 3,
            "per_device_train_batch_size": ROWS,
            "max_seq_length": SEQUENCE,
            "gradient_bucket_size_MB": 0.01,
            **keys,
        }
    )
    job = describe_job(arguments, strategy=replace(resolve_strategy(arguments), schedule=schedule))
    engine, peaks = start_engine(job, 0, CPU), []
    for step in range(2):
        batch = hard_global_batch(5, step, 1, 3, VOCABULARY)
        result = engine.worker.step([batch[0, index] for index in range(3)], 1e-2)
        assert result.peak_gradient_bytes == job.program.peak_gradient_bytes[0]
        peaks.append(result.peak_gradient_bytes)
    return engine, {name: p.detach().clone() for name, p in engine.parameters_by_name().items()}, peaks


@pytest.mark.parametrize("keys", [{}, {"release_grads": True}, {"recompute": True}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_halves_end_with_the_bits_of_whole_backwards_in_the_same_memory(model, dtype, keys):
    engine, halved, peaks = trained("ZBH1", model, dtype=dtype, **keys)
    _, whole, peaks_of_whole = trained("1F1B", model, dtype=dtype, **keys)
    assert [name for name in whole if not torch.equal(halved[name], whole[name])] == []
    assert peaks == peaks_of_whole
    for bucket in engine.worker.gradients.buckets.values():
        gradients = [parameter.grad for parameter in bucket.parameters]
        assert not any(gradient is not None and gradient.requires_grad for gradient in gradients)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_whose_backward_can_hardly_be_halved_says_so(model):
    keys = {"model_config": {**SIZES, **MODELS[model]}, "pipeline_parallel_degree": 2, "gradient_accumulation_steps": 4}
    arguments = arguments_from_mapping({**keys, "pipeline_schedule_mode": "ZBH1"})
    warnings = " ".join(describe_job(arguments).strategy.warnings)
    assert ("Halving backwards gains little here" in warnings) == ("experts" in model)
    assert "gains little" not in " ".join(describe_job(arguments_from_mapping(keys)).strategy.warnings)
