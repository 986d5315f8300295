"""Every schedule, with every number of stages and micro-batches, computes the gradient of one process, in the company
of every option of a gradient's life.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from syncline.arguments import arguments_from_mapping
from syncline.training.job import describe_job
from syncline.verification.numerical import verification_job
from tests.verification.configurations import GRADIENT_LIFE, LLAMA, OPTIONS, Keys, keys_of
from tests.verification.covering import pairwise
from tests.verification.test_numerical import assert_all_pass

pytestmark = pytest.mark.ranks


def pipeline(positions: int, replicas: int = 1, **keys) -> Keys:
    return {"pipeline_parallel_degree": positions, "nproc_per_node": positions * replicas, **keys}


SCHEDULES: Mapping[str, Keys] = {
    name if stages == 1 else f"{name}, {stages} stages a rank": {
        "pipeline_schedule_mode": name,
        "virtual_pp_degree": stages,
    }
    for name, stages in (
        *(("1F1B", 1), ("FThenB", 1), ("ZBH1", 1), ("VPP", 2), ("VPP", 3), ("FThenB", 2), ("ZBH1", 2), ("ZBH1", 3)),
        *(("ZBV", 2), ("DualPipeV", 2)),
    )
} | {
    # Less than 1F1B holds, more, and what is chosen from all of them.
    "Bounded, 1 micro-batch": {"pipeline_schedule_mode": "Bounded", "pipeline_activation_limit": 1},
    "Bounded, 2 stages a rank": {
        "pipeline_schedule_mode": "Bounded",
        "virtual_pp_degree": 2,
        "pipeline_activation_limit": 5.5,
    },
    "BoundedV, 1.5 micro-batches": {"pipeline_schedule_mode": "BoundedV", "pipeline_activation_limit": 1.5},
    "best": {"pipeline_schedule_mode": "best", "pipeline_activation_limit": 2},
}

CHOICES: Mapping[str, Mapping[str, Keys]] = {
    "topology": {
        "pp=2": pipeline(2),
        "pp=3": pipeline(3),
        "pp=4": pipeline(4),
        "pp=2 dp=2": pipeline(2, 2),
        "pp=2, tensors": pipeline(2, 2, sharding="stage1"),
        "pp=2, slices": pipeline(2, 2, sharding="stage1", sharding_parallel_config="split_param"),
        "pp=2, stage 2": pipeline(2, 2, sharding="stage2"),
        "pp=2, stage 3": pipeline(2, 2, sharding="stage3"),
        "pp=3, stage 3": pipeline(3, 2, sharding="stage3"),
    },
    "schedule": SCHEDULES,
    "k": {f"k={k}": {"gradient_accumulation_steps": k} for k in range(1, 13)},
    **GRADIENT_LIFE,
    **{name: OPTIONS[name] for name in ("tying", "frozen", "shapes", "recompute")},
}

RUNS = [
    (choice, keys_of(choice, CHOICES)) for choice in pairwise({name: tuple(each) for name, each in CHOICES.items()})
]


def test_the_runs_cover_every_schedule_with_every_number_of_micro_batches():
    assert len({(choice["schedule"], choice["k"]) for choice, _ in RUNS}) == len(SCHEDULES) * 12
    assert len({(choice["schedule"], choice["topology"]) for choice, _ in RUNS}) == len(SCHEDULES) * 9


@pytest.mark.parametrize("topology", CHOICES["topology"])
def test_every_schedule_computes_the_same_gradient(pool, topology):
    runs = {", ".join(choice.values()): keys for choice, keys in RUNS if choice["topology"] == topology}
    assert_all_pass(pool, CHOICES["topology"][topology]["nproc_per_node"], runs)


def test_verify_takes_the_schedule_that_training_takes():
    keys = keys_of({"topology": "pp=2", "schedule": "best", "k": "k=8"}, CHOICES)
    arguments = arguments_from_mapping(keys)
    trained, verified = describe_job(arguments), verification_job(arguments)
    assert trained.strategy.virtual_stages > 1
    for name in ("schedule", "virtual_stages", "activation_limit"):
        assert getattr(verified.strategy, name) == getattr(trained.strategy, name)
    assert verified.notes == trained.notes
    assert verified.program.halves_backwards


FAMILIES = ("qwen2", "gemma2", "gpt_neox", "phi3", "mixtral")
"""With biases, tied and scaled embeddings, and experts."""


def test_halved_backwards_compute_the_same_gradient_in_every_family(pool):
    runs = {}
    for index, family in enumerate(FAMILIES):
        config = {"model_type": family, "num_hidden_layers": 5, "tie_word_embeddings": index % 2 == 0}
        for schedule in ("ZBH1", "ZBV"):
            runs[f"{family}, {schedule}"] = {
                **pipeline(2, 2, sharding="stage2" if index % 2 else "stage1"),
                "model_config": config,
                "pipeline_schedule_mode": schedule,
                "gradient_accumulation_steps": 3,
            }
    assert_all_pass(pool, 4, runs)


def test_layers_are_divided_as_listed(pool):
    runs = {
        method: {
            **pipeline(2),
            "model_config": {**LLAMA, "num_hidden_layers": 6},
            "pp_seg_method": method,
            "gradient_accumulation_steps": 2,
        }
        for method in ("1,5", "layer:DecoderLayer")
    }
    assert_all_pass(pool, 2, runs)
