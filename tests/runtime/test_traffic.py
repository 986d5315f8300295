"""What a run sends and holds is what its program says, to the byte."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from syncline.arguments import arguments_from_mapping
from syncline.engine import start_engine
from syncline.job import describe_job
from syncline.program.text import to_json
from syncline.verification.batches import ROWS, SEQUENCE, hard_global_batch
from tests.groups import reused_groups
from tests.stand_ins import CPU

pytestmark = pytest.mark.ranks

VOCABULARY = 64
K = 3
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "vocab_size": VOCABULARY,
}

TOPOLOGIES = {
    "one process": (1, 1),
    "dp=2": (2, 1),
    "dp=3": (3, 1),
    "pp=2": (2, 2),
    "pp=3": (3, 3),
    "pp=2 dp=2": (4, 2),
}
"""(ranks, pipeline stages)"""

REDUCTIONS: Mapping[str, Mapping[str, Any]] = {
    "every micro-batch": {"gradient_sync": "every_micro_batch"},
    "last micro-batch": {},
    "last micro-batch, not overlapped": {"overlap_gradient_reduction": False},
    "after accumulation": {"data_parallel_config": "gradient_sync_after_accumulate"},
    "average": {"data_parallel_config": "enable_allreduce_avg_in_gradient_scale"},
    "bfloat16 on the wire": {"gradient_reduce_dtype": "bfloat16"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 gradients": {"dtype": "bfloat16", "amp_master_grad": False},
    "float64": {"dtype": "float64"},
}


def variants() -> dict[str, dict[str, Any]]:
    """Each of `REDUCTIONS` tied or untied, kept or released; all four meet some of them."""
    named = {}
    for index, (name, keys) in enumerate(REDUCTIONS.items()):
        tied, release = index % 2 == 0, index // 2 % 2 == 0
        config = {**LLAMA, "tie_word_embeddings": tied}
        named[f"{name}, {tied=}, {release=}"] = {**keys, "model_config": config, "release_grads": release}
    return named


Figures = dict[str, list[int]]
"""Bytes sent, at the peak and held, as the program says first, then as each step counted."""


def figures_of(rank: int, world_size: int, stages: int, keys: Mapping[str, Any]) -> Figures:
    arguments = arguments_from_mapping(
        {
            "nproc_per_node": world_size,
            "pipeline_parallel_degree": stages,
            "gradient_accumulation_steps": K,
            "per_device_train_batch_size": ROWS,
            "max_seq_length": SEQUENCE,
            "gradient_bucket_size_MB": 0.002,
            **keys,
        }
    )
    job = describe_job(arguments)
    worker = start_engine(job, rank, CPU).worker
    topology = job.strategy.topology
    summary = to_json(job.program)["summary"]
    figures: Figures = {
        "sent": [summary["bytes_sent_per_rank"][rank]],
        "peak": [summary["peak_gradient_bytes_per_rank"][rank]],
        "held": [summary["gradient_bytes_between_steps_per_rank"][rank]],
    }
    for step in range(2):
        batch = hard_global_batch(0, step, topology.replicas, K, VOCABULARY)
        result = worker.step([batch[topology.replica(rank), index] for index in range(K)], 1e-3)
        figures["sent"].append(result.bytes_sent)
        figures["peak"].append(result.peak_gradient_bytes)
        figures["held"].append(result.held_gradient_bytes)
    return figures


def all_figures(rank: int, world_size: int, stages: int, named: Mapping[str, Mapping[str, Any]]) -> dict[str, Figures]:
    found = {}
    with reused_groups() as groups:
        for name, keys in named.items():
            groups.next_run()
            found[name] = figures_of(rank, world_size, stages, keys)
    return found


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_counted_bytes_equal_the_programs(pool, topology):
    ranks, stages = TOPOLOGIES[topology]
    for rank, found in enumerate(pool.run(ranks, all_figures, stages, variants(), timeout=240.0)):
        for name, figures in found.items():
            for what, (expected, *counted) in figures.items():
                assert counted == [expected] * 2, f"{what} on rank {rank} with [{name}]"
            assert figures["peak"][0] > 0
            assert (figures["sent"][0] > 0) == (ranks > 1)
            assert (figures["held"][0] == 0) == ("release=True" in name), name
