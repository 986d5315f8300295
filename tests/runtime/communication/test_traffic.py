"""What a run sends and holds is what its program says, to the byte; and what it says it sends, the kernel sees."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from syncline.arguments import arguments_from_mapping
from syncline.program.actions import ReduceGradients
from syncline.program.display.text import to_json
from syncline.runtime.worker import StepResult, Worker
from syncline.training.engine import start_engine
from syncline.training.job import Job, describe_job
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

TOPOLOGIES: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "one process": (1, {}),
    "dp=2": (2, {}),
    "dp=3": (3, {}),
    "pp=2": (2, {"pipeline_parallel_degree": 2}),
    "pp=3": (3, {"pipeline_parallel_degree": 3}),
    "pp=2 dp=2": (4, {"pipeline_parallel_degree": 2}),
}
"""Ranks, and what they are."""

SHARDED_TOPOLOGIES: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "sharding=2": (2, {}),
    "sharding=3": (3, {}),
    "dp=2 sharding=2": (4, {"sharding_parallel_degree": 2}),
    "pp=2 sharding=2": (4, {"pipeline_parallel_degree": 2}),
}

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

FORMS: Mapping[str, Mapping[str, Any]] = {
    "tensors": {"sharding": "stage1"},
    "slices": {"sharding": "stage1", "sharding_parallel_config": "split_param"},
    "stage 2": {"sharding": "stage2"},
    "stage 3": {"sharding": "stage3"},
    "tensors, freed": {"sharding": "stage1", "sharding_parallel_config": "free_grads_in_comm"},
    "slices, at once": {
        "sharding": "stage1",
        "sharding_parallel_config": "split_param",
        "overlap_parameter_gather": False,
    },
}


def variants() -> dict[str, dict[str, Any]]:
    """Each of `REDUCTIONS` tied or untied, kept or released; all four meet some of them."""
    named = {}
    for index, (name, keys) in enumerate(REDUCTIONS.items()):
        tied, release = index % 2 == 0, index // 2 % 2 == 0
        config = {**LLAMA, "tie_word_embeddings": tied}
        named[f"{name}, {tied=}, {release=}"] = {**keys, "model_config": config, "release_grads": release}
    return named


def sharded_variants(turn: int) -> dict[str, dict[str, Any]]:
    """Every form of sharding with every micro-batch reduced, and with one of the other `variants`, which take turns."""
    every, *others = variants().items()
    named = {}
    for index, (form, keys) in enumerate(FORMS.items()):
        for name, variant in (every, others[(turn + index) % len(others)]):
            named[f"{form}, {name}"] = {**variant, **keys}
    return named


Figures = dict[str, list[Any]]
"""Each figure as the program says first, then as each step counted."""


def job_of(world_size: int, keys: Mapping[str, Any]) -> Job:
    return describe_job(
        arguments_from_mapping(
            {
                "nproc_per_node": world_size,
                "gradient_accumulation_steps": K,
                "per_device_train_batch_size": ROWS,
                "max_seq_length": SEQUENCE,
                "gradient_bucket_size_MB": 0.002,
                **keys,
            }
        )
    )


def figures_of(rank: int, world_size: int, keys: Mapping[str, Any]) -> Figures:
    job = job_of(world_size, keys)
    worker = start_engine(job, rank, CPU).worker
    summary = to_json(job.program)["summary"]
    figures: Figures = {
        "sent": [summary["bytes_sent_per_rank"][rank]],
        "sent by group": [summary["bytes_sent_by_group_per_rank"][rank]],
        "reductions": [sum(isinstance(action, ReduceGradients) for action in job.program.ranks[rank])],
        "peak": [summary["peak_gradient_bytes_per_rank"][rank]],
        "held": [summary["gradient_bytes_between_steps_per_rank"][rank]],
        "gathered": [summary["peak_gathered_bytes_per_rank"][rank]],
    }
    for step in range(2):
        result = one_step(job, worker, rank, step)
        figures["sent"].append(result.bytes_sent)
        figures["sent by group"].append({group: sent for group, sent in result.bytes_sent_by_group.items() if sent})
        figures["reductions"].append(result.reductions)
        figures["peak"].append(result.peak_gradient_bytes)
        figures["held"].append(result.held_gradient_bytes)
        figures["gathered"].append(result.peak_gathered_bytes)
    return figures


def one_step(job: Job, worker: Worker, rank: int, step: int) -> StepResult:
    topology, k = job.strategy.topology, job.strategy.micro_batches
    batch = hard_global_batch(0, step, topology.replicas, k, VOCABULARY)
    return worker.step([batch[topology.replica(rank), index] for index in range(k)], 1e-3)


def all_figures(
    rank: int, world_size: int, keys: Mapping[str, Any], named: Mapping[str, Mapping[str, Any]]
) -> dict[str, Figures]:
    found = {}
    with reused_groups() as groups:
        for name, variant in named.items():
            groups.next_run()
            found[name] = figures_of(rank, world_size, {**keys, **variant})
    return found


def assert_as_the_program_says(found: Mapping[str, Figures], rank: int) -> None:
    for name, figures in found.items():
        for what, (expected, *counted) in figures.items():
            assert counted == [expected] * 2, f"{what} on rank {rank} with [{name}]"


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_counted_bytes_equal_the_programs(pool, topology):
    ranks, degrees = TOPOLOGIES[topology]
    for rank, found in enumerate(pool.run(ranks, all_figures, degrees, variants(), timeout=240.0)):
        assert_as_the_program_says(found, rank)
        for name, figures in found.items():
            assert figures["peak"][0] > 0
            assert (figures["sent"][0] > 0) == (ranks > 1)
            assert (figures["held"][0] == 0) == ("release=True" in name), name
            assert figures["gathered"][0] == 0


@pytest.mark.parametrize(("turn", "topology"), list(enumerate(SHARDED_TOPOLOGIES)))
def test_counted_bytes_equal_the_programs_under_sharding(pool, turn, topology):
    ranks, degrees = SHARDED_TOPOLOGIES[topology]
    by_rank = pool.run(ranks, all_figures, degrees, sharded_variants(2 * turn), timeout=240.0)
    for rank, found in enumerate(by_rank):
        for name, figures in found.items():
            assert figures["sent by group"][0]["sharding"] > 0
            assert (figures["held"][0] == 0) == ("release=True" in name), name
            assert (figures["gathered"][0] > 0) == name.startswith("stage 3")
        assert_as_the_program_says(found, rank)


# ---- What the kernel sees --------------------------------------------------------------------------------------------

INTERFACES = Path("/proc/net/dev")
HEADERS_AND_NOISE = 0.03
"""By how much a count may differ: headers, acknowledgements, and what other processes send meanwhile."""
REPETITIONS = 30
"""At most, while others send too much."""

LARGE: Mapping[str, Any] = {
    "model_config": {**LLAMA, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4},
    "gradient_accumulation_steps": 1,
    "gradient_bucket_size_MB": 4.0,
}
"""Some MB of parameters."""

ON_LOOPBACK: Mapping[str, Mapping[str, Any]] = {
    "plain replicas": {},
    "slices": FORMS["slices"],
    "stage 3": FORMS["stage 3"],
}


def sent_on_loopback() -> int:
    """Bytes that the loopback interface has ever sent."""
    (line,) = (line for line in INTERFACES.read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def loopback(rank: int, world_size: int, variants: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """For every variant what the program says that all ranks send in a step, and what the kernel has counted.

    Others only ever add to the count, so the smallest of some repetitions is nearest to the truth.
    """
    found = {}
    for name, keys in variants.items():
        job = job_of(world_size, {**LARGE, **keys})
        worker = start_engine(job, rank, CPU).worker
        expected = sum(to_json(job.program)["summary"]["bytes_sent_per_rank"])
        smallest = torch.tensor(2**62)
        for step in range(REPETITIONS):
            dist.barrier()
            before = sent_on_loopback()
            one_step(job, worker, rank, step)
            worker.parameters.settle()
            dist.barrier()
            smallest = torch.minimum(smallest, torch.tensor(sent_on_loopback() - before))
            dist.all_reduce(smallest, dist.ReduceOp.MIN)
            if smallest < (1 + HEADERS_AND_NOISE) * expected:
                break
        found[name] = (expected, int(smallest))
    return found


@pytest.mark.skipif(not INTERFACES.exists(), reason=f"{INTERFACES} is missing: only Linux counts what interfaces send")
def test_the_kernel_counts_what_the_program_says(pool):
    for name, (expected, counted) in pool.run(2, loopback, ON_LOOPBACK, timeout=120.0)[0].items():
        assert expected > 2**21
        assert counted == pytest.approx(expected, rel=HEADERS_AND_NOISE), name
