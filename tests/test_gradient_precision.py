"""How exact gradients are in the dtypes that are trained in: float32, bfloat16 parameters, a bfloat16 wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from syncline.arguments import arguments_from_mapping
from syncline.data.batch import IGNORED_LABEL
from syncline.modeling.load import build_meta_model
from syncline.modeling.materialise import materialise
from syncline.program.actions import Action, Backward, ClipGradients
from syncline.training.engine import Engine, build_stage, start_engine
from syncline.training.job import Job, describe_job
from syncline.verification.batches import ROWS, SEQUENCE, GlobalBatch, hard_global_batch
from syncline.verification.double import InFloat64
from tests.groups import reused_groups
from tests.stand_ins import CPU

pytestmark = pytest.mark.ranks

VOCABULARY = 128
SEED = 5
STEP = 0
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
}
TOPOLOGIES: Mapping[str, Mapping[str, int]] = {
    "dp=2": {"nproc_per_node": 2},
    "pp=2": {"nproc_per_node": 2, "pipeline_parallel_degree": 2},
    "pp=2 dp=2": {"nproc_per_node": 4, "pipeline_parallel_degree": 2},
}
FLOAT32_TOLERANCE = 1e-5
"""Relative to the largest gradient of the reference."""
BFLOAT16_ROUNDING = 2.0**-8
"""The largest relative error of rounding to bfloat16's 8 significant bits."""

Keys = Mapping[str, Any]
Gradients = dict[str, Tensor]


def make_job(keys: Keys) -> Job:
    defaults = {
        "model_config": LLAMA,
        "gradient_accumulation_steps": 3,
        "per_device_train_batch_size": ROWS,
        "max_seq_length": SEQUENCE,
        "gradient_bucket_size_MB": 0.01,
        "optim": "sgd",
        "max_grad_norm": 0.0,
    }
    return describe_job(arguments_from_mapping({**defaults, **keys}))


def global_batch(job: Job) -> GlobalBatch:
    return hard_global_batch(SEED, STEP, job.strategy.topology.replicas, job.strategy.micro_batches, VOCABULARY)


def gradients_after(kind: type[Action], engine: Engine, job: Job, rank: int, learning_rate: float = 0.0) -> Gradients:
    """The main gradients of one step as they stand after its last action of one kind."""
    found: Gradients = {}

    def observe(action: Action) -> None:
        if isinstance(action, kind):
            for bucket in engine.worker.gradients.buckets.values():
                for slot in bucket.bucket.slots:
                    values = bucket.flat[slot.offset : slot.offset + slot.numel]
                    found[slot.name] = values.view(slot.shape).clone()

    batch, replica = global_batch(job), job.strategy.topology.replica(rank)
    own = [batch[replica, index] for index in range(job.strategy.micro_batches)]
    engine.worker.step(own, learning_rate, observe)
    assert found
    return found


# ---- Float32 ---------------------------------------------------------------------------------------------------------


def float64_gradients(job: Job) -> Gradients:
    """One process on the whole global batch, its parameters the same float32 numbers, widened."""
    model = build_meta_model(job.config)
    materialise(model, dtype=torch.float64, device="cpu", seed=job.arguments.seed)
    batch = global_batch(job).values()
    input_ids, labels = (torch.cat([getattr(each, name) for each in batch]) for name in ("input_ids", "labels"))
    with InFloat64():
        logits = model(input_ids=input_ids).logits
        functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL).backward()
    return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}


def float32_errors(rank: int, world_size: int, configurations: Mapping[str, Keys]) -> dict[str, dict[str, float]]:
    """For each configuration and parameter the error of the reduced gradient, and of the update that it makes at
    learning rate 1, relative to the largest gradient of the reference.
    """
    errors: dict[str, dict[str, float]] = {}
    with reused_groups() as groups:
        for name, keys in configurations.items():
            groups.next_run()
            job = make_job(keys)
            assert job.strategy.gradient_dtype == job.strategy.reduce_dtype == "float32"
            engine = start_engine(job, rank, CPU)
            parameters = engine.parameters_by_name()
            before = {key: parameter.detach().clone() for key, parameter in parameters.items()}
            reduced = gradients_after(ClipGradients, engine, job, rank, learning_rate=1.0)
            reference = float64_gradients(job)
            largest = max(gradient.abs().max() for gradient in reference.values())
            assert reduced.keys() == parameters.keys()
            errors[name] = {}
            for key, parameter in parameters.items():
                update = before[key].double() - parameter.detach().double()
                for what, gradient in (("gradient", reduced[key].double()), ("update", update)):
                    error = (gradient - reference[key]).abs().max() / largest
                    errors[name][f"{what} of {key}"] = float(error)
    return errors


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_float32_gradients_are_those_of_one_process_in_float64(pool, topology):
    variants: dict[str, Keys] = {
        "untied": {},
        "tied": {"model_config": {**LLAMA, "tie_word_embeddings": True}},
        "released, every micro-batch": {"release_grads": True, "gradient_sync": "every_micro_batch"},
    }
    ranks = TOPOLOGIES[topology]["nproc_per_node"]
    configurations = {name: {**TOPOLOGIES[topology], **keys} for name, keys in variants.items()}
    names = set()
    for errors in pool.run(ranks, float32_errors, configurations):
        for name, by_parameter in errors.items():
            names |= by_parameter.keys()
            wrong = {key: error for key, error in by_parameter.items() if not error <= FLOAT32_TOLERANCE}
            assert not wrong, f"[{name}]: {wrong}"
            # In float32, not by accident in float64.
            assert max(by_parameter.values()) > 1e-9
    assert {
        f"{what} of {part}.weight" for what in ("gradient", "update") for part in ("lm_head", "model.norm")
    } <= names


# ---- Bfloat16 parameters ---------------------------------------------------------------------------------------------


def summed_one_by_one(job: Job, rank: int) -> Gradients:
    """Each micro-batch's bfloat16 gradients by plain autograd, added up in float32; those of a tied embedding's two
    uses as well.
    """
    batch = global_batch(job)
    tokens = sum(micro_batch.valid_tokens for micro_batch in batch.values())
    total: Gradients = {}
    for index in range(job.strategy.micro_batches):
        stage = build_stage(job, 0, CPU)
        head = stage.model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())
        loss = stage(batch[job.strategy.topology.replica(rank), index])
        loss.backward(torch.full_like(loss, 1 / tokens))
        own: Gradients = {}
        for name, parameter in stage.parameters_by_name().items():
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.bfloat16
            own[name] = parameter.grad.float()
        if job.config.tie_word_embeddings:
            own["model.embed_tokens.weight"] += own.pop("lm_head.weight")
        total = {name: total[name] + gradient if total else gradient for name, gradient in own.items()}
    return total


def main_and_plain_gradients(rank: int, world_size: int, keys: Keys) -> tuple[Gradients, Gradients]:
    job = make_job(keys)
    engine = start_engine(job, rank, CPU)
    return gradients_after(Backward, engine, job, rank), summed_one_by_one(job, rank)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("release", [False, True], ids=["kept", "released"])
def test_bfloat16_gradients_are_summed_in_float32(pool, release, tied):
    keys = {
        "model_config": {**LLAMA, "tie_word_embeddings": tied},
        "nproc_per_node": 2,
        "dtype": "bfloat16",
        "gradient_accumulation_steps": 5,
        "release_grads": release,
        "data_parallel_config": "gradient_sync_after_accumulate",
    }
    for found, expected in pool.run(2, main_and_plain_gradients, keys):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert found[name].dtype == torch.float32
            assert torch.equal(found[name], gradient), name
        # A sum held in bfloat16 would be another.
        assert any(not torch.equal(gradient, gradient.bfloat16().float()) for gradient in expected.values())


# ---- A bfloat16 wire -------------------------------------------------------------------------------------------------


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def wire(rank: int, world_size: int, keys: Keys) -> None:
    """Compare the reduced gradients of a bfloat16 wire with those of a float32 one."""
    local: dict[str, Gradients] = {}
    reduced: dict[str, Gradients] = {}
    with reused_groups() as groups:
        for dtype in ("float32", "bfloat16"):
            for kind, found in ((Backward, local), (ClipGradients, reduced)):
                groups.next_run()
                job = make_job({**keys, "nproc_per_node": world_size, "gradient_reduce_dtype": dtype})
                assert job.strategy.reduce_dtype == dtype
                found[dtype] = gradients_after(kind, start_engine(job, rank, CPU), job, rank)
    differs = False
    for name, exact in reduced["float32"].items():
        rounded = reduced["bfloat16"][name]
        assert rounded.dtype == torch.float32
        assert torch.equal(rounded, rounded.bfloat16().float()), "what arrived was not bfloat16"
        assert torch.equal(local["float32"][name], local["bfloat16"][name])
        of_all = [torch.empty_like(rounded) for _ in range(world_size)]
        dist.all_gather(of_all, rounded)
        assert all(torch.equal(bits(other), bits(rounded)) for other in of_all), name
        # Every addend is rounded once, then each partial sum, none of which is larger than the sum of magnitudes.
        magnitude = local["float32"][name].abs().double()
        dist.all_reduce(magnitude)
        if "data_parallel_config" in keys:
            magnitude /= world_size
        bound = (world_size + 1) * BFLOAT16_ROUNDING * magnitude
        assert ((rounded.double() - exact.double()).abs() <= bound).all(), name
        differs |= not torch.equal(rounded, exact)
    assert differs


@pytest.mark.parametrize("average", [False, True], ids=["sum", "average"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bfloat16_wire_rounds_alike_on_all_ranks_and_no_more_than_it_must(pool, dtype, ranks, average):
    keys: dict[str, Any] = {"dtype": dtype, "overlap_gradient_reduction": False}
    if average:
        keys["data_parallel_config"] = "enable_allreduce_avg_in_gradient_scale"
    pool.run(ranks, wire, keys)
