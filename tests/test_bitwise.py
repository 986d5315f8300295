"""Options that only move work leave every bit of every parameter as it was."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import pytest
import torch
from torch import Tensor

from syncline.arguments import arguments_from_mapping
from syncline.training.engine import start_engine
from syncline.training.job import describe_job
from syncline.verification.batches import ROWS, SEQUENCE, hard_global_batch
from tests.groups import reused_groups
from tests.stand_ins import CPU

pytestmark = pytest.mark.ranks

STEPS = 5
STEPS_WHEN_SHARDED = 3
SEED = 11
VOCABULARY = 128
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
}

TOPOLOGIES = {
    "dp=2": (2, {}),
    "dp=3": (3, {}),
    "pp=2": (2, {"pipeline_parallel_degree": 2}),
    "pp=2 dp=2": (4, {"pipeline_parallel_degree": 2}),
    "sharding=2": (2, {}),
    "sharding=3": (3, {}),
    "dp=2 sharding=2": (4, {"sharding_parallel_degree": 2}),
    "pp=2 sharding=2": (4, {"pipeline_parallel_degree": 2}),
}

REPLICATED = [topology for topology in TOPOLOGIES if "sharding" not in topology]
SHARDED = [topology for topology in TOPOLOGIES if "sharding" in topology]

AFTER = {"data_parallel_config": "gradient_sync_after_accumulate"}
NO_OVERLAP = {"overlap_gradient_reduction": False}
RELEASE = {"release_grads": True}
EVERY = {"gradient_sync": "every_micro_batch"}

MOVED: Mapping[str, Mapping[str, Any]] = {
    "last micro-batch, overlapped": {},
    "last micro-batch": NO_OVERLAP,
    "after accumulation": AFTER,
    "last micro-batch, overlapped, released": RELEASE,
    "last micro-batch, released": {**NO_OVERLAP, **RELEASE},
    "after accumulation, released": {**AFTER, **RELEASE},
    "timers": {"pipeline_parallel_config": "enable_timer"},
    "offloaded": {"offload_activations": True},
}
"""Ways to do the same arithmetic."""

HALVED = {"pipeline_schedule_mode": "ZBH1"}

MOVED_IN_A_PIPELINE: Mapping[str, Mapping[str, Any]] = {
    "all forwards first": {"pipeline_schedule_mode": "FThenB"},
    "halved backwards": HALVED,
    "halved backwards, after accumulation, released": {**HALVED, **AFTER, **RELEASE},
    "halved backwards, recomputed": {**HALVED, "recompute": True},
    "halved backwards, offloaded": {**HALVED, "offload_activations": True},
    "shapes with every message": {"pipeline_parallel_config": "disable_p2p_cache_shape"},
    "shapes each step": {"pipeline_parallel_config": "enable_clear_every_step_cache"},
    "received ahead": {"pipeline_parallel_config": "enable_overlap_p2p_comm"},
    "received ahead, shapes each step": {
        "pipeline_parallel_config": "enable_overlap_p2p_comm enable_clear_every_step_cache"
    },
    "received ahead, halved": {**HALVED, "pipeline_parallel_config": "enable_overlap_p2p_comm"},
}

MOVED_IN_EVERY_BACKWARD: Mapping[str, Mapping[str, Any]] = {
    "every micro-batch, overlapped": EVERY,
    "every micro-batch": {**EVERY, **NO_OVERLAP},
    "every micro-batch, overlapped, released": {**EVERY, **RELEASE},
}

Digests = dict[str, str]
"""Parameter (or what was reported) -> a digest of its bits."""


def trained(rank: int, world_size: int, keys: Mapping[str, Any], steps: int = STEPS) -> dict[str, Tensor]:
    """This rank's parameters after all steps, and what each step reported."""
    arguments = arguments_from_mapping(
        {
            "model_config": LLAMA,
            "nproc_per_node": world_size,
            "gradient_accumulation_steps": 4,
            "per_device_train_batch_size": ROWS,
            "max_seq_length": SEQUENCE,
            "weight_decay": 0.1,
            "gradient_bucket_size_MB": 0.01,
            "max_grad_norm": 0.5,
            **keys,
        }
    )
    job = describe_job(arguments)
    engine = start_engine(job, rank, CPU)
    topology, k = job.strategy.topology, job.strategy.micro_batches
    found: dict[str, Tensor] = {}
    for step in range(steps):
        batch = hard_global_batch(SEED, step, topology.replicas, k, VOCABULARY)
        result = engine.worker.step([batch[topology.replica(rank), index] for index in range(k)], 1e-3)
        assert result.gradient_norm is not None
        found[f"loss of step {step}"] = result.loss
        found[f"norm of step {step}"] = result.gradient_norm
    with engine.worker.parameters.whole():
        return {**found, **{name: p.detach().clone() for name, p in engine.parameters_by_name().items()}}


def digests(
    rank: int,
    world_size: int,
    variants: Mapping[str, Mapping[str, Any]],
    keys: Mapping[str, Any],
    steps: int = STEPS,
) -> dict[str, Digests]:
    """For every variant of `keys`, the bits that this rank ends with."""
    found = {}
    with reused_groups() as groups:
        for name, variant in variants.items():
            groups.next_run()
            values = trained(rank, world_size, {**keys, **variant}, steps)
            found[name] = {
                key: sha256(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
                for key, value in values.items()
            }
    return found


def assert_bitwise_equal(pool, topology: str, variants: Mapping[str, Mapping[str, Any]], **keys: Any) -> None:
    """Between variants on every rank, and between ranks for all that they share."""
    ranks, degrees = TOPOLOGIES[topology]
    steps = STEPS_WHEN_SHARDED if topology in SHARDED else STEPS
    by_rank = pool.run(ranks, digests, variants, {**degrees, **keys}, steps, timeout=240.0)
    for rank, found in enumerate(by_rank):
        reference_name, reference = next(iter(found.items()))
        for name, variant in found.items():
            different = [key for key in reference if variant[key] != reference[key]]
            assert not different, f"rank {rank}, [{name}] against [{reference_name}]: {different}"
            for other_rank, other in enumerate(by_rank):
                shared = [key for key in reference if key in other[name]]
                different = [key for key in shared if other[name][key] != variant[key]]
                assert not different, f"[{name}], rank {rank} against rank {other_rank}: {different}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("topology", REPLICATED)
def test_release_overlap_and_the_moment_of_one_reduction_change_no_bit(pool, topology, dtype):
    """Under bfloat16 gradients accumulate in float32 and update float32 master weights."""
    pipeline = MOVED_IN_A_PIPELINE if topology.startswith("pp") else {}
    assert_bitwise_equal(pool, topology, {**MOVED, **pipeline}, dtype=dtype)


@pytest.mark.parametrize("topology", ["dp=3", "pp=2 dp=2"])
def test_release_and_overlap_change_no_bit_when_every_micro_batch_is_reduced(pool, topology):
    assert_bitwise_equal(pool, topology, MOVED_IN_EVERY_BACKWARD)


@pytest.mark.parametrize("keys", [{"amp_master_grad": False}, {"gradient_reduce_dtype": "bfloat16"}, {"optim": "sgd"}])
def test_other_precisions_and_optimizers_change_no_bit_either(pool, keys):
    assert_bitwise_equal(pool, "dp=2", MOVED, dtype="bfloat16", **keys)


def test_the_order_of_stages_on_a_rank_changes_no_bit(pool):
    keys = {"virtual_pp_degree": 2, "model_config": {**LLAMA, "num_hidden_layers": 5}}
    variants = {**MOVED, **MOVED_IN_A_PIPELINE}
    assert_bitwise_equal(pool, "pp=2", variants, **keys)
    assert_bitwise_equal(pool, "pp=2 dp=2", variants, **keys)


# ---- Sharding --------------------------------------------------------------------------------------------------------

AT_ONCE = {"overlap_parameter_gather": False}
FREED = {"sharding_parallel_config": "free_grads_in_comm"}
TIMERS = {"pipeline_parallel_config": "enable_timer"}
BY_TENSORS = {"sharding": "stage1"}
BY_SLICES = {"sharding": "stage1", "sharding_parallel_config": "split_param"}
STAGE2, STAGE3 = {"sharding": "stage2"}, {"sharding": "stage3"}

SOME: Mapping[str, Mapping[str, Any]] = {"overlapped": {}, "after accumulation, released": {**AFTER, **RELEASE}}
MOVED_WHEREVER_SHARDED: Mapping[str, Mapping[str, Any]] = {
    **SOME,
    "not overlapped": NO_OVERLAP,
    "after accumulation": AFTER,
    "overlapped, released": RELEASE,
    "timers": TIMERS,
}
MOVED_IN_STAGE_1: Mapping[str, Mapping[str, Any]] = {
    **MOVED_WHEREVER_SHARDED,
    "gathered at once": AT_ONCE,
    "not overlapped, gathered at once, released": {**NO_OVERLAP, **AT_ONCE, **RELEASE},
    "freed": FREED,
    "not overlapped, freed, released": {**NO_OVERLAP, **FREED, **RELEASE},
    "after accumulation, freed, gathered at once": {**AFTER, **FREED, **AT_ONCE},
}

Variants = dict[str, dict[str, Any]]


def form(name: str, keys: Mapping[str, Any], variants: Mapping[str, Mapping[str, Any]]) -> Variants:
    """The variants of one form of sharding; flags of one key are joined."""
    joined = {}
    for variant, added in variants.items():
        flags = f"{keys.get('sharding_parallel_config', '')} {added.get('sharding_parallel_config', '')}".strip()
        joined[f"{name}, {variant}"] = {**keys, **added, **({"sharding_parallel_config": flags} if flags else {})}
    return joined


def sliced(moved: Mapping[str, Mapping[str, Any]], moved_in_stage_1: Mapping[str, Mapping[str, Any]]) -> Variants:
    """All forms in which each rank owns a slice of every bucket."""
    return {
        **form("slices", BY_SLICES, moved_in_stage_1),
        **form("stage 2", STAGE2, moved),
        **form("stage 3", STAGE3, moved),
    }


def test_what_only_moves_work_changes_no_bit_when_tensors_have_owners(pool):
    assert_bitwise_equal(pool, "sharding=2", form("tensors", BY_TENSORS, MOVED_IN_STAGE_1))


def test_what_only_moves_work_changes_no_bit_when_slices_have_owners(pool):
    """Stages 1 and 2 and 3 included: the same buckets, the same order of sums, and so the same bits."""
    recomputed = form(
        "stage 3",
        STAGE3,
        {
            "recomputed": {"recompute": True},
            "recomputed and offloaded": {"recompute": True, "offload_activations": True},
        },
    )
    assert_bitwise_equal(pool, "sharding=2", {**sliced(MOVED_WHEREVER_SHARDED, MOVED_IN_STAGE_1), **recomputed})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("topology", SHARDED)
def test_forms_of_sharding_change_no_bit_in_any_topology(pool, topology, dtype):
    tensors = form("tensors", BY_TENSORS, {"overlapped": {}, "after accumulation, freed": {**AFTER, **FREED}})
    assert_bitwise_equal(pool, topology, tensors, dtype=dtype)
    slices = {
        **form("slices", BY_SLICES, {"overlapped": {}, "after accumulation, at once": {**AFTER, **AT_ONCE}}),
        **form("stage 2", STAGE2, {"overlapped, released": RELEASE}),
        **form("stage 3", STAGE3, SOME),
    }
    assert_bitwise_equal(pool, topology, slices, dtype=dtype)


@pytest.mark.parametrize("topology", ["sharding=2", "dp=2 sharding=2"])
def test_shards_of_every_micro_batch_add_up_to_the_same_bits(pool, topology):
    released: Variants = {"every micro-batch, not overlapped, released": {**EVERY, **NO_OVERLAP, **RELEASE}}
    freed: Variants = {**released, "every micro-batch, freed": {**EVERY, **FREED}}
    assert_bitwise_equal(pool, topology, sliced({"every micro-batch": EVERY}, freed))
    assert_bitwise_equal(pool, topology, form("tensors", BY_TENSORS, {"every micro-batch": EVERY, **freed}))


@pytest.mark.parametrize("topology", ["pp=2", "pp=2 dp=2", "pp=2 sharding=2"])
def test_both_ways_down_the_ranks_and_up_again_end_with_the_same_bits(pool, topology):
    """The embedding and the head that is tied to it are on one rank."""
    both: Variants = {}
    for schedule in ("ZBV", "DualPipeV"):
        for name, variant in {**SOME, "not overlapped": NO_OVERLAP, "timers": TIMERS}.items():
            both[f"{schedule}, {name}"] = {"pipeline_schedule_mode": schedule, **variant}
    sharding = BY_SLICES if "sharding" in topology else {}
    assert_bitwise_equal(pool, topology, both, **sharding, model_config={**LLAMA, "num_hidden_layers": 5})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("keys", [{}, BY_TENSORS, BY_SLICES, STAGE2, STAGE3], ids=str)
def test_halved_backwards_lose_no_gradient_whatever_is_sharded(pool, keys, dtype):
    """Other tools drop weight gradients here, or never reduce them, without an error."""
    pieces: Variants = {"whole backwards": {}, "halved": HALVED, "halved, released": {**HALVED, **RELEASE}}
    once: Variants = {
        **pieces,
        "halved, after accumulation": {**HALVED, **AFTER},
        "halved, not overlapped": {**HALVED, **NO_OVERLAP},
    }
    assert_bitwise_equal(pool, "pp=2 sharding=2", once, **keys, dtype=dtype)
    assert_bitwise_equal(pool, "pp=2 sharding=2", pieces, **keys, **EVERY, dtype=dtype)


@pytest.mark.parametrize("keys", [{"amp_master_grad": False}, {"gradient_reduce_dtype": "bfloat16"}, {"optim": "sgd"}])
def test_other_precisions_and_optimizers_change_no_bit_under_sharding_either(pool, keys):
    assert_bitwise_equal(pool, "sharding=2", sliced(SOME, SOME), dtype="bfloat16", **keys)


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_optimizers_of_whole_tensors_change_no_bit_by_tensors(pool, optimizer):
    assert_bitwise_equal(pool, "sharding=2", form("tensors", BY_TENSORS, SOME), optim=optimizer)


def test_two_ranks_end_with_the_bits_of_plain_replicas_whatever_they_divide(pool):
    """A sum of two has one order. Only the norm adds squares in the order of buckets and slices, so nothing is clipped;
    and of three, an all-reduce adds in another order than owners do.
    """
    forms = {**form("tensors", BY_TENSORS, SOME), **sliced(SOME, SOME)}
    plain: Variants = {"plain replicas": {}}
    found = pool.run(2, digests, {**plain, **forms}, {"max_grad_norm": 0.0}, STEPS_WHEN_SHARDED, timeout=240.0)
    for by_name in found:
        expected = by_name["plain replicas"]
        for name, variant in by_name.items():
            different = [key for key in expected if variant[key] != expected[key] and "norm of step" not in key]
            assert not different, f"[{name}]: {different}"


def differences_of_averages(rank: int, world_size: int, keys: Mapping[str, Any]) -> dict[str, float]:
    """How far apart the sum with a division and the average in the collective end, relative to the largest value."""
    average = {"data_parallel_config": "enable_allreduce_avg_in_gradient_scale"}
    summed, averaged = (trained(rank, world_size, {**keys, **variant}) for variant in ({}, average))
    return {
        name: float((summed[name].double() - averaged[name].double()).abs().max() / summed[name].double().abs().max())
        for name in summed
    }


@pytest.mark.parametrize("topology", ["dp=3", "pp=2 dp=2"])
def test_averaging_in_the_collective_changes_rounding_only(pool, topology):
    ranks, degrees = TOPOLOGIES[topology]
    for differences in pool.run(ranks, differences_of_averages, {**degrees, "optim": "sgd"}, timeout=240.0):
        assert max(differences.values()) < 1e-5, differences


def test_a_change_of_arithmetic_is_seen(pool):
    """Delaying the scale rounds differently; nothing else tells these runs apart."""
    variants = {"scaled loss": {}, "delayed scale": {"pipeline_parallel_config": "enable_delay_scale_loss"}}
    for found in pool.run(2, digests, variants, {}):
        scaled, delayed = found.values()
        different = [name for name in scaled if scaled[name] != delayed[name]]
        assert "model.embed_tokens.weight" in different
