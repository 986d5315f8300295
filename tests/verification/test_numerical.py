"""Every configuration trains as one process on the whole batch does; a wrong one is found out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch

from syncline.arguments import arguments_from_mapping
from syncline.errors import UserError
from syncline.program.actions import (
    Action,
    ClipGradients,
    OptimizerStep,
    Part,
    ReduceGradients,
    ReduceLoss,
    ReduceReplicated,
    ScaleLoss,
    WaitReduce,
    ZeroGradients,
)
from syncline.program.scales import Factor
from syncline.runtime.buckets import GradientBucket
from syncline.training.engine import Engine, start_engine
from syncline.training.job import Job
from syncline.verification import numerical
from syncline.verification.numerical import TOLERANCE, Report, verification_job, verify_rank
from tests.groups import reused_groups
from tests.verification.configurations import (
    LLAMA,
    TOPOLOGIES,
    Keys,
    covering_configurations,
    gradient_life_product,
)

pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")
COVERING = covering_configurations()
PRODUCT = gradient_life_product()
FAMILIES = ("qwen2", "qwen3", "gemma2", "gpt_neox", "phi3", "olmo2", "mixtral")


def verify_all(rank: int, world_size: int, configurations: Mapping[str, Keys]) -> dict[str, Report]:
    """Verify one configuration after another; what goes wrong says in which."""
    reports = {}
    with reused_groups() as groups:
        for name, keys in configurations.items():
            groups.next_run()
            try:
                reports[name] = verify_rank(arguments_from_mapping(keys), rank, CPU)
            except Exception as error:
                raise RuntimeError(f"while verifying [{name}]") from error
    return reports


def assert_all_pass(pool, ranks: int, configurations: Mapping[str, Keys]) -> None:
    """On every rank, which all report the same."""
    assert configurations
    first, *others = pool.run(ranks, verify_all, configurations, timeout=240.0)
    failed = [f"[{name}]: {report}" for name, report in first.items() if not report.passed]
    assert not failed, "\n".join(failed)
    assert set(first) == set(configurations)
    assert all(reports == first for reports in others)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_pair_of_options_computes_the_same_gradient(pool, topology):
    covering = {name: keys for name, keys in COVERING.items() if name.startswith(f"{topology},")}
    assert_all_pass(pool, TOPOLOGIES[topology]["nproc_per_node"], covering)


@pytest.mark.parametrize("part", range(4))
def test_every_combination_of_gradient_options_computes_the_same_gradient(pool, part):
    assert_all_pass(pool, 2, dict(list(PRODUCT.items())[part::4]))


def test_every_family_computes_the_same_gradient(pool):
    configurations = {}
    for index, family in enumerate(FAMILIES):
        config = {"model_type": family, "num_hidden_layers": 4, "tie_word_embeddings": index % 2 == 0}
        configurations[family] = {
            "model_config": config,
            "nproc_per_node": 4,
            "pipeline_parallel_degree": 2,
            "gradient_accumulation_steps": 3,
            "weight_decay": 0.1,
            "release_grads": index % 3 == 0,
        }
    assert_all_pass(pool, 4, configurations)


@pytest.mark.parametrize("order", ["pp_first", "sharding_first"])
def test_three_stages_of_two_replicas_with_a_tied_embedding(pool, order):
    keys = {
        "model_config": {**LLAMA, "tie_word_embeddings": True},
        "nproc_per_node": 6,
        "pipeline_parallel_degree": 3,
        "gradient_accumulation_steps": 4,
        "hybrid_parallel_topo_order": order,
    }
    assert_all_pass(pool, 6, {order: keys})


def test_models_with_dropout_pass(pool):
    configurations = {
        family: {"model_config": {"model_type": family}, "nproc_per_node": 2, "gradient_accumulation_steps": 2}
        for family in ("gpt2", "opt", "bloom")
    }
    assert_all_pass(pool, 2, configurations)


def test_what_the_small_model_cannot_take_over_passes(pool):
    """A kernel for GPUs, and frozen layers that it does not have."""
    pipeline = {"model_config": {**LLAMA, "num_hidden_layers": 24}, "nproc_per_node": 2, "pipeline_parallel_degree": 2}
    configurations = {
        "flash attention": {**pipeline, "attn_implementation": "flash_attention_2"},
        "a layer that is not there": {**pipeline, "freeze_parameters": [r"layers\.20\."]},
        "all but a layer that is not there": {
            **pipeline,
            "freeze_parameters": [r"layers\.(?!20\.)", "embed", "lm_head"],
        },
    }
    assert_all_pass(pool, 2, configurations)


def test_every_verification_has_a_frozen_parameter_and_trained_ones():
    for choice in (*COVERING.values(), {"model_config": LLAMA}):
        frozen = [spec.frozen for spec in verification_job(arguments_from_mapping(choice)).layout.specs]
        assert 0 < sum(frozen) < len(frozen) - 1


@pytest.mark.parametrize("pattern", ["layer_norm", r"layers\.12\."])
def test_a_pattern_without_match_in_the_full_model_is_refused(pattern):
    arguments = arguments_from_mapping({"model_config": LLAMA, "freeze_parameters": [pattern]})
    with pytest.raises(UserError, match=r"freeze_parameters.*matches no parameter"):
        verification_job(arguments)
    everything = arguments_from_mapping({"model_config": LLAMA, "freeze_parameters": ["model", "lm_head"]})
    with pytest.raises(UserError, match="every parameter of the model is frozen"):
        verification_job(everything)


# ---- What must be found out ------------------------------------------------------------------------------------------

Change = Callable[[int, Sequence[Action]], Sequence[Action]]


def without(*kinds: type[Action]) -> Change:
    return lambda rank, actions: [action for action in actions if not isinstance(action, kinds)]


def without_reductions_of_one_bucket(rank: int, actions: Sequence[Action]) -> Sequence[Action]:
    bucket = next(action.bucket for action in actions if isinstance(action, ReduceGradients))
    return [a for a in actions if not (isinstance(a, (ReduceGradients, WaitReduce)) and a.bucket == bucket)]


def sum_not_average(rank: int, actions: Sequence[Action]) -> Sequence[Action]:
    return [replace(action, op="sum") if isinstance(action, ReduceGradients) else action for action in actions]


def scaled_once_more(kind: type[Action], ranks: Sequence[int]) -> Change:
    def change(rank: int, actions: Sequence[Action]) -> Sequence[Action]:
        if rank not in ranks:
            return actions
        return [
            replace(action, scale=action.scale * Factor.of(accumulation=-1)) if isinstance(action, kind) else action  # type: ignore[attr-defined,call-arg]
            for action in actions
        ]

    return change


def tied_copy_counted_twice(rank: int, actions: Sequence[Action]) -> Sequence[Action]:
    held = tuple(action.bucket for action in actions if isinstance(action, OptimizerStep))
    return [replace(action, buckets=held) if isinstance(action, ClipGradients) else action for action in actions]


def reduced_on_the_wrong_micro_batch(rank: int, actions: Sequence[Action]) -> Sequence[Action]:
    """The reductions of the last backward move to the one before it."""
    synchronisation = [a for a in actions if isinstance(a, (ReduceGradients, WaitReduce))]
    rest = [a for a in actions if not isinstance(a, (ReduceGradients, WaitReduce))]
    backwards = [index for index, action in enumerate(rest) if type(action).__name__ == "Backward"]
    early = [replace(a, during=None) if isinstance(a, ReduceGradients) else a for a in synchronisation]
    return [*rest[: backwards[-2] + 1], *early, *rest[backwards[-2] + 1 :]]


WRONG_PROGRAMS: dict[str, Change] = {
    "no reduction": without(ReduceGradients, WaitReduce),
    "one bucket is not reduced": without_reductions_of_one_bucket,
    "a sum without its division": sum_not_average,
    "no tied sum": without(ReduceReplicated),
    "gradients leak into the next step": without(ZeroGradients),
    "unscaled losses": without(ScaleLoss),
    "a loss scale of its own on one replica": scaled_once_more(ScaleLoss, ranks=(3,)),
    "the first stage divided once more": scaled_once_more(OptimizerStep, ranks=(0, 1)),
    "a wrong reported loss": scaled_once_more(ReduceLoss, ranks=(0, 1, 2, 3)),
    "a tied copy counted twice in the norm": tied_copy_counted_twice,
    "the wrong micro-batch is reduced": reduced_on_the_wrong_micro_batch,
}

WRONG_KEYS = {
    "model_config": {**LLAMA, "tie_word_embeddings": True},
    "nproc_per_node": 4,
    "pipeline_parallel_degree": 2,
    "gradient_accumulation_steps": 3,
    "overlap_gradient_reduction": False,
    "data_parallel_config": "enable_allreduce_avg_in_gradient_scale",
}


def verify_broken(rank: int, world_size: int, wrong: Sequence[str]) -> dict[str, Report]:
    """The report on each of the wrong programs, which replace the right one behind the back of its checks."""
    reports = {}
    with reused_groups() as groups:
        for name in wrong:
            groups.next_run()
            with mock.patch.object(numerical, "start_engine", starting_with(WRONG_PROGRAMS[name])):
                reports[name] = verify_rank(arguments_from_mapping(WRONG_KEYS), rank, CPU)
    return reports


def starting_with(change: Change) -> Callable[[Job, int, torch.device], Engine]:
    def start(job: Job, rank: int, device: torch.device) -> Engine:
        return start_engine(replace(job, program=job.program.map_ranks(change)), rank, device)

    return start


def test_a_wrong_program_does_not_pass(pool):
    assert_all_pass(pool, 4, {"right": WRONG_KEYS})
    for reports in pool.run(4, verify_broken, list(WRONG_PROGRAMS), timeout=240.0):
        passed = [name for name, report in reports.items() if report.passed]
        assert not passed
        assert all(report.max_relative_error > 1e3 * TOLERANCE for report in reports.values()), reports
    assert "loss" in reports["a wrong reported loss"].worst_parameter


def verify_perturbed(rank: int, world_size: int, keys: Keys, wrong_rank: int, amount: float) -> Report:
    """On one rank, the first number of every bucket's first gradient is off by `amount`."""
    honest = GradientBucket.allocate

    def allocate(bucket: GradientBucket, part: Part = Part.BUCKET) -> None:
        honest(bucket, part)
        bucket.flat[0] += amount

    if rank == wrong_rank:
        with mock.patch.object(GradientBucket, "allocate", allocate):
            return verify_rank(arguments_from_mapping(keys), rank, CPU)
    return verify_rank(arguments_from_mapping(keys), rank, CPU)


@pytest.mark.parametrize("wrong_rank", [0, 1])
def test_one_wrong_number_on_one_rank_does_not_pass(pool, wrong_rank):
    keys = {"model_config": LLAMA, "nproc_per_node": 2, "pipeline_parallel_degree": 2, "optim": "sgd"}
    for report in pool.run(2, verify_perturbed, keys, wrong_rank, 1e-3):
        assert not report.passed
    for report in pool.run(2, verify_perturbed, keys, wrong_rank, 0.0):
        assert report.passed, report


def verify_poisoned(rank: int, world_size: int) -> Report:
    """One rank's last bucket of gradients becomes NaN."""
    honest = GradientBucket.zero

    def zero(bucket: GradientBucket, part: Part = Part.BUCKET) -> None:
        honest(bucket, part)
        if rank == 1:
            bucket.flat.fill_(float("nan"))

    keys = {"model_config": LLAMA, "nproc_per_node": 2}
    with mock.patch.object(GradientBucket, "zero", zero):
        return verify_rank(arguments_from_mapping(keys), rank, CPU)


def test_not_a_number_does_not_pass(pool):
    for report in pool.run(2, verify_poisoned):
        assert not report.passed
        assert report.max_relative_error == float("inf")


def test_the_worst_rank_is_named(pool):
    keys = {"model_config": LLAMA, "nproc_per_node": 2, "pipeline_parallel_degree": 2, "max_grad_norm": 0.0}
    for wrong_rank in (0, 1):
        for report in pool.run(2, verify_moved_parameter, keys, wrong_rank):
            assert not report.passed
            assert report.worst_rank == wrong_rank
            assert report.parameters > 0


def verify_moved_parameter(rank: int, world_size: int, keys: Keys, wrong_rank: int) -> Report:
    """On one rank, the parameters have moved by one part in a billion once the last step is over."""
    honest = numerical._compare

    def compare(engine: Engine, *others):
        with torch.no_grad():
            for parameter in engine.parameters_by_name().values():
                parameter.mul_(1 + 1e-9 * (rank == wrong_rank))
        return honest(engine, *others)

    with mock.patch.object(numerical, "_compare", compare):
        return verify_rank(arguments_from_mapping(keys), rank, CPU)
