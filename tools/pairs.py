"""What settings do in each other's company: which are refused together, and which have no effect.

A *setting* is one key with its value, or one flag. What is said of it comes from `resolve_strategy`, and nothing is
said here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from syncline.arguments import arguments_from_mapping
from syncline.arguments.flags import DATA, FLAGS, PIPELINE, SHARDING, Status
from syncline.errors import UserError
from syncline.strategy.resolve import resolve_strategy
from tools.combinations import AXES, BY_SLICES, Keys

BASE: Keys = {
    "data_parallel_degree": 2,
    "sharding_parallel_degree": 2,
    "pipeline_parallel_degree": 2,
    "gradient_accumulation_steps": 3,
    "dtype": "bfloat16",
}
"""Where no degree, nor the dtype, keeps a setting from having an effect."""

COMPANIES: dict[str, Keys] = {
    "one replica": {"data_parallel_degree": 1, "sharding_parallel_degree": 1},
    "one stage": {"pipeline_parallel_degree": 1, **AXES["sharding"][BY_SLICES]},
    **AXES["sharding"],
}

VALUES: dict[str, tuple[object, ...]] = {
    "gradient_sync": ("every_micro_batch", "last_micro_batch", "after_accumulation"),
    "overlap_gradient_reduction": (True, False),
    "overlap_parameter_gather": (True, False),
    "release_grads": (True, False),
    "gradient_reduce_dtype": ("bfloat16", "float64"),
    "dtype": ("float64", "float32"),
    "amp_master_grad": (True, False),
    "fp16_opt_level": ("O1",),
    "optim": ("adafactor", "muon"),
    "sharding_comm_buffer_size_MB": (16,),
    "gradient_bucket_size_MB": (8,),
    "gradient_accumulation_steps": (1,),
    "pipeline_schedule_mode": ("FThenB", "VPP", "ZBH1", "ZBV", "DualPipeV", "Bounded", "BoundedV", "best"),
    "pipeline_activation_limit": (2,),
    "virtual_pp_degree": (2,),
    "offload_activations": (True, False),
    "hybrid_parallel_topo_order": ("sharding_first",),
}
"""Those values of each key that are looked at."""


@dataclass(frozen=True)
class Setting:
    key: str
    value: object

    def __str__(self) -> str:
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.key}: {value}"


@dataclass(frozen=True)
class Refused:
    """What is refused for one reason; the message is one of `given`, the reason, and what to write instead."""

    given: tuple[str, ...]
    wrong: str
    instead: str


@dataclass(frozen=True)
class Warned:
    """A warning, and in whose company a setting gets it."""

    said: str
    company: tuple[str, ...]


def settings() -> list[Setting]:
    keys = [Setting(key, value) for key, values in VALUES.items() for value in values]
    acting = [flag for flag in FLAGS if flag.status in (Status.EFFECTIVE, Status.NO_EFFECT)]
    return keys + [
        Setting(flag.configs[0], flag.name) for flag in acting if flag.configs[0] in (DATA, PIPELINE, SHARDING)
    ]


def refused_together() -> list[Refused]:
    """In any company, and of every two settings."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for company in (*_single_companies(), *_pairs()):
        answer = _ask(*company)
        if isinstance(answer, UserError):
            found.setdefault((answer.wrong, answer.instead), {})[answer.given] = None
    return [Refused(tuple(given), wrong, instead) for (wrong, instead), given in found.items()]


def warned_together() -> list[Warned]:
    """In any company, and of every two settings what is said of neither alone."""
    found: dict[str, dict[str, None]] = {}
    alone: set[str] = set()
    for name, keys in COMPANIES.items():
        for setting in (None, *settings()):
            for said in _warnings(keys, *([_keys(setting)] if setting else [])):
                found.setdefault(said, {})[name] = None
                alone.add(said)
    for first, second in combinations(settings(), 2):
        for said in _warnings(AXES["sharding"][BY_SLICES], _keys(first), _keys(second)):
            if said not in alone:
                found.setdefault(said, {})[f"{first}, {second}"] = None
    return [Warned(said, tuple(company)) for said, company in found.items()]


def _single_companies() -> Iterator[tuple[Keys, ...]]:
    for keys in COMPANIES.values():
        yield from ((keys, _keys(setting)) for setting in settings())


def _pairs() -> Iterator[tuple[Keys, ...]]:
    for first, second in combinations(settings(), 2):
        if first.key != second.key or first.key.endswith("_config"):
            yield from ((form, _keys(first), _keys(second)) for form in AXES["sharding"].values())


def _warnings(*parts: Keys) -> tuple[str, ...]:
    answer = _ask(*parts)
    return () if isinstance(answer, UserError) else answer


def _ask(*parts: Keys) -> UserError | tuple[str, ...]:
    """The refusal of these keys, or the warnings; flags of one option are joined."""
    keys = dict(BASE)
    for part in parts:
        for key, value in part.items():
            keys[key] = f"{keys.get(key, '')} {value}".strip() if key.endswith("_config") else value
    try:
        return resolve_strategy(arguments_from_mapping(keys)).warnings
    except UserError as error:
        return error


def _keys(setting: Setting) -> Keys:
    return {setting.key: setting.value}
