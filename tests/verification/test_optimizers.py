"""Every optimizer and every parameter group trains on many ranks as PyTorch's optimizers do on one, parameter by
parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from syncline.arguments import arguments_from_mapping
from syncline.runtime.optimization.optimizer import OptimizerSettings
from syncline.training.engine import Engine, start_engine
from syncline.training.job import Job
from syncline.verification import numerical
from syncline.verification.numerical import (
    LEARNING_RATE,
    TOLERANCE,
    Report,
    learning_rate,
    verification_job,
    verify_rank,
)
from tests.groups import reused_groups
from tests.verification.configurations import LLAMA, Keys
from tests.verification.test_numerical import assert_all_pass

CPU = torch.device("cpu")

GROUPS = [
    {"pattern": "lm_head", "weight_decay": 0.0, "learning_rate": 2e-4},
    {"pattern": "norm", "weight_decay": 0.2, "learning_rate": 5e-3},
    {"pattern": r"layers\.0\..*v_proj"},
    {"pattern": "v_proj", "learning_rate": 0.0},
    {"pattern": r"layers\.1\.|used_by_some", "weight_decay": 0.3},
]
GROUPED = {
    "model_config": LLAMA,
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
    "gradient_accumulation_steps": 2,
    "parameter_groups": GROUPS,
}
TIED = {"model_config": {**LLAMA, "tie_word_embeddings": True}}
LORA_LIKE = {
    "freeze_parameters": ["embed", "lm_head", "norm", "mlp|used_by", "k_proj", "o_proj"],
    "parameter_groups": [
        {"pattern": "v_proj", "learning_rate": 3e-3, "weight_decay": 0.0},
        {"pattern": r"layers\.1\.", "learning_rate": 2e-4},
    ],
}

STAGE1 = {"sharding": "stage1"}
SLICES = {"sharding": "stage1", "sharding_parallel_config": "split_param"}
STAGE2 = {"sharding": "stage2", "gradient_sync": "every_micro_batch"}
STAGE3 = {"sharding": "stage3"}
PIPELINE = {"pipeline_parallel_degree": 2}
PAIRS = {"sharding": "stage1", "sharding_parallel_degree": 2}


def grouped(ranks: int, *parts: Mapping[str, Any], **keys: Any) -> Keys:
    """`GROUPED` on so many ranks, with some of the above."""
    found: Keys = {**GROUPED, "nproc_per_node": ranks}
    for part in (*parts, keys):
        found.update(part)
    return found


ON_ONE = {optim: grouped(1, optim=optim) for optim in ("adamw", "sgd", "adafactor", "muon")}

ON_TWO = {
    "replicas": grouped(2),
    "stage1 by tensors": grouped(2, STAGE1),
    "stage1 by slices": grouped(2, SLICES, TIED),
    "stage2": grouped(2, STAGE2),
    "stage3": grouped(2, STAGE3, release_grads=True),
    "stage3 of sgd": grouped(2, STAGE3, optim="sgd"),
    "pipeline": grouped(2, PIPELINE),
    "tied pipeline": grouped(2, PIPELINE, TIED),
    "few trained parameters": grouped(2, LORA_LIKE),
    "few trained parameters by slices": grouped(2, SLICES, LORA_LIKE),
    "few trained parameters in stage3": grouped(2, STAGE3, LORA_LIKE),
    **{f"{optim} of replicas": grouped(2, TIED, optim=optim) for optim in ("adafactor", "muon")},
    **{f"{optim} by tensors": grouped(2, STAGE1, optim=optim) for optim in ("adafactor", "muon")},
    **{f"{optim} in a pipeline": grouped(2, PIPELINE, TIED, optim=optim) for optim in ("adafactor", "muon")},
    "muon of experts": grouped(
        2, STAGE1, optim="muon", model_config={"model_type": "qwen3_moe", "num_hidden_layers": 4}
    ),
    "adafactor of biases that change nothing": grouped(
        2, STAGE1, optim="adafactor", model_config={"model_type": "opt", "num_hidden_layers": 4}, parameter_groups=[]
    ),
    "a muon momentum": grouped(2, optim="muon", muon_momentum=0.5, parameter_groups=[]),
}

ON_THREE = {f"{optim} by tensors": grouped(3, STAGE1, TIED, optim=optim) for optim in ("adafactor", "muon")}

ON_FOUR = {
    "adamw in a pipeline of stage3": grouped(4, PIPELINE, STAGE3),
    **{f"{optim}, 2 x 2": grouped(4, PAIRS, optim=optim) for optim in ("adafactor", "muon")},
    **{f"{optim} in a pipeline": grouped(4, PAIRS, PIPELINE, optim=optim) for optim in ("adafactor", "muon")},
    **{
        f"{optim} in a tied pipeline": grouped(4, PAIRS, PIPELINE, TIED, optim=optim) for optim in ("adafactor", "muon")
    },
}


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "configurations"), [(1, ON_ONE), (2, ON_TWO), (3, ON_THREE), (4, ON_FOUR)])
def test_groups_and_optimizers_train_as_on_one_rank(pool, ranks, configurations):
    assert_all_pass(pool, ranks, configurations)


def test_the_small_model_has_all_groups_and_all_rules_at_work():
    for keys in (*ON_ONE.values(), *ON_TWO.values(), *ON_FOUR.values()):
        arguments = arguments_from_mapping(keys)
        job = verification_job(arguments)
        assert job.arguments.parameter_groups == arguments.parameter_groups
        trained = {spec.settings for spec in job.layout.specs if not spec.frozen}
        assert trained == set(range(len(job.optimizer_settings))) or "freeze_parameters" in keys
        assert len(trained) > 1


def test_the_fastest_parameters_have_the_learning_rate_of_the_verification():
    fast = verification_job(arguments_from_mapping(ON_ONE["adamw"]))
    assert learning_rate(fast) * max(settings.learning_rate for settings in fast.optimizer_settings) == pytest.approx(
        LEARNING_RATE
    )
    assert learning_rate(verification_job(arguments_from_mapping({"model_config": LLAMA}))) == LEARNING_RATE


# ---- What must be found out ------------------------------------------------------------------------------------------

ChangeRule = Callable[[OptimizerSettings], OptimizerSettings]

WRONG_RULES: dict[str, tuple[str, ChangeRule]] = {
    "a learning rate": ("sgd", lambda settings: replace(settings, learning_rate=settings.learning_rate * 1.0001)),
    "a decay": ("adamw", lambda settings: replace(settings, weight_decay=settings.weight_decay + 0.001)),
    "a decay of adafactor": (
        "adafactor",
        lambda settings: replace(settings, weight_decay=settings.weight_decay + 0.001),
    ),
    "a learning rate of adafactor": ("adafactor", lambda settings: replace(settings, learning_rate=0.999)),
    "a momentum": ("muon", lambda settings: replace(settings, momentum=0.9)),
    "a decay of muon": ("muon", lambda settings: replace(settings, weight_decay=settings.weight_decay + 0.001)),
    "a kind": ("muon", lambda settings: replace(settings, kind="adamw")),
}


def verify_wrong_rules(rank: int, world_size: int) -> dict[str, Report]:
    """The report where one settings is another than was configured, behind the back of the reference."""
    reports = {}
    with reused_groups() as groups:
        for name, (optim, change) in WRONG_RULES.items():
            groups.next_run()
            with mock.patch.object(numerical, "start_engine", starting_with(change)):
                arguments = arguments_from_mapping(grouped(2, STAGE1, optim=optim, parameter_groups=[]))
                reports[name] = verify_rank(arguments, rank, CPU)
    return reports


def starting_with(change: ChangeRule) -> Callable[[Job, int, torch.device], Engine]:
    """The first settings, that of the embedding and, but for muon, of all matrices, is changed; under muon
    the second.
    """

    def start(job: Job, rank: int, device: torch.device) -> Engine:
        place = next((place for place, settings in enumerate(job.optimizer_settings) if settings.kind == "muon"), 0)
        all_settings = list(job.optimizer_settings)
        all_settings[place] = change(all_settings[place])
        return start_engine(replace(job, optimizer_settings=tuple(all_settings)), rank, device)

    return start


@pytest.mark.ranks
def test_a_wrong_rule_does_not_pass(pool):
    for reports in pool.run(2, verify_wrong_rules, timeout=120.0):
        assert set(reports) == set(WRONG_RULES)
        assert all(report.max_relative_error > 1e3 * TOLERANCE for report in reports.values()), reports


def muon_step(gradient: torch.Tensor) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    torch.optim.Muon([parameter], lr=1.0, adjust_lr_fn="match_rms_adamw").step()
    return parameter.detach()


def test_the_iteration_of_muon_gives_equal_bits_for_gradients_that_differ_by_rounding_only():
    """Why one tolerance will do for all optimizers, although it iterates in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        gradient, noise = torch.randn(2, 64, 32, generator=generator, dtype=torch.float64)
        assert torch.equal(muon_step(gradient), muon_step(gradient * (1 + 1e-14 * noise)))
        amplified = muon_step(gradient * (1 + 1e-4 * noise)) - muon_step(gradient)
        assert amplified.abs().max() > 1e-3 * muon_step(gradient).abs().max()
