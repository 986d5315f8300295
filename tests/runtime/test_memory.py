"""What the allocator sees: gradient storage peaks where the program says, and memory does not creep up."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from syncline.arguments import arguments_from_mapping
from syncline.data.batch import MicroBatch
from syncline.runtime.communication.collectives import Collectives
from syncline.training.engine import Engine, start_engine
from syncline.training.job import Job, describe_job
from tests.groups import reused_groups
from tests.stand_ins import CPU

pytestmark = pytest.mark.ranks

K = 2
VOCABULARY = 512
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_size": 192,
    "intermediate_size": 384,
    "vocab_size": VOCABULARY,
}
"""A layer has 1.5 MB of parameters."""
ACTIVATIONS = 256 * 1024
"""More than the bytes of four tokens' activations."""

FORMS: Mapping[str, Mapping[str, Any]] = {
    "not sharded": {},
    "stage 1 by tensors": {"sharding": "stage1"},
    "stage 1 by slices": {"sharding": "stage1", "sharding_parallel_config": "split_param"},
    "stage 1 by slices, freed": {"sharding": "stage1", "sharding_parallel_config": "split_param free_grads_in_comm"},
    "stage 2": {"sharding": "stage2"},
    "stage 2, every micro-batch": {"sharding": "stage2", "gradient_sync": "every_micro_batch"},
    "stage 3": {"sharding": "stage3"},
    "stage 3, every micro-batch": {"sharding": "stage3", "gradient_sync": "every_micro_batch"},
}


def engine_of(rank: int, world_size: int, keys: Mapping[str, Any]) -> tuple[Job, Engine]:
    arguments = arguments_from_mapping(
        {
            "model_config": LLAMA,
            "nproc_per_node": world_size,
            "gradient_accumulation_steps": K,
            "per_device_train_batch_size": 1,
            "max_seq_length": 64,
            "gradient_bucket_size_MB": 1.6,
            **keys,
        }
    )
    job = describe_job(arguments)
    return job, start_engine(job, rank, CPU)


def micro_batches(rank: int, step: int, lengths: tuple[int, ...]) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    batches = []
    for length in lengths:
        tokens = torch.randint(0, VOCABULARY, (1, length + 1), generator=generator)
        positions = torch.arange(length).unsqueeze(0)
        batches.append(MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions).to(CPU))
    return batches


def allocated_at_the_peak(step: Any) -> int:
    """By how many bytes the CPU allocator's live memory rises at most while `step` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def peaks(rank: int, world_size: int, named: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    found = {}
    with reused_groups() as groups:
        for name, keys in named.items():
            groups.next_run()
            job, engine = engine_of(rank, world_size, keys)
            worker = engine.worker
            for step in range(2):
                worker.step(micro_batches(rank, step, (4, 4)), 1e-3)
            held = worker.gradients.memory.held
            batches = micro_batches(rank, 2, (4, 4))
            rise = allocated_at_the_peak(lambda batches=batches, worker=worker: worker.step(batches, 1e-3))
            found[name] = {
                "allocated": held + rise,
                "program": job.program.peak_gradient_bytes[rank],
                "counted": worker.gradients.memory.peak,
                "gathered": job.program.peak_gathered_bytes[rank],
                "bucket": max(job.program.gradient_bytes(bucket.id) for bucket in job.layout.buckets),
            }
    return found


@pytest.mark.parametrize("release", [False, True], ids=["kept", "released"])
def test_the_allocator_sees_the_programs_peak_of_gradients(pool, release):
    """Within one bucket, which is what an owner receives from another rank before it adds it; and a few activations."""
    named = {name: {**keys, "release_grads": release} for name, keys in FORMS.items()}
    for found in pool.run(2, peaks, named, timeout=120.0):
        for name, figures in found.items():
            assert figures["counted"] == figures["program"], name
            expected = figures["program"] + figures["gathered"]
            assert abs(figures["allocated"] - expected) <= figures["bucket"] + ACTIVATIONS, (name, figures)


# ---- Over many steps -------------------------------------------------------------------------------------------------

STEPS = 200


def memory_in_use() -> int:
    """Reserved device memory, or the process's resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.memory_reserved()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def memory_over_steps(rank: int, world_size: int, keys: Mapping[str, Any]) -> list[int]:
    """After each of many steps whose sequence lengths change within and between steps."""
    job, engine = engine_of(rank, world_size, {**keys, "release_grads": True})
    assert len(job.layout.buckets) > 3
    found = []
    for step in range(STEPS):
        lengths = (8 + 8 * (step % 5), 40 - 8 * (step % 3))
        result = engine.worker.step(micro_batches(rank, step, lengths), 1e-4)
        assert result.held_gradient_bytes == 0
        found.append(memory_in_use())
    return found


@pytest.mark.parametrize("form", ["not sharded", "stage 1 by slices", "stage 3, every micro-batch"])
def test_memory_is_flat_over_200_steps_with_release(pool, form):
    for found in pool.run(2, memory_over_steps, FORMS[form], timeout=240.0):
        early, late = max(found[20:100]), max(found[100:])
        assert late <= 1.005 * early, (early, late)


def outlived_by(rank: int, world_size: int, keys: Mapping[str, Any]) -> list[str]:
    """What is left of an engine and its process groups when nobody refers to it any more."""
    _, engine = engine_of(rank, world_size, keys)
    engine.worker.step(micro_batches(rank, 0, (8, 8)), 1e-4)
    left: dict[str, ReferenceType[Any]] = {
        "worker": ref(engine.worker),
        "gradients": ref(engine.worker.gradients),
        **{name: ref(parameter) for name, parameter in engine.parameters_by_name().items()},
    }
    del engine
    gc.collect()
    groups = [each for each in gc.get_objects() if isinstance(each, Collectives)]
    return [*(name for name, found in left.items() if found() is not None), *map(str, groups)]


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_left_of_an_engine_that_is_discarded(pool, form):
    assert pool.run(2, outlived_by, FORMS[form]) == [[], []]


def test_layers_of_one_size_have_buckets_of_one_size():
    """So that what one bucket has freed fits the next."""
    for keys in FORMS.values():
        arguments = arguments_from_mapping(
            {"model_config": LLAMA, "nproc_per_node": 2, "gradient_bucket_size_MB": 1.6, **keys}
        )
        layout = describe_job(arguments).layout
        layers = [b.numel for b in layout.buckets if all(".layers." in slot.name for slot in b.slots)]
        if keys.get("sharding") == "stage1" and "sharding_parallel_config" not in keys:
            continue  # By tensors, buckets follow owners.
        assert len(layers) == 6
        assert len(set(layers)) == 1
