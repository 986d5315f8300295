"""The options of a gradient's life in every combination, as the keys that a user would write, and what becomes of each.

An *axis* is one thing to decide and a *choice* one answer to it; a *combination* makes a choice on every axis. What is
refused and what has no effect is not said here: `resolve_strategy` says it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from typing import Any

from syncline.arguments import arguments_from_mapping
from syncline.errors import UserError
from syncline.program.build import passes
from syncline.strategy import Strategy
from syncline.strategy.resolve import resolve_strategy

Keys = dict[str, Any]
Choices = Mapping[str, str]
"""Axis -> choice; a combination, or a part of one."""


def _topology_name(dp: int, sharding: int, pp: int) -> str:
    degrees = {"dp": dp, "sharding": sharding, "pp": pp}
    return " ".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1) or "one rank"


DEGREES = {
    _topology_name(*degrees): degrees
    for degrees in (
        *((1, 1, 1), (2, 1, 1), (3, 1, 1), (8, 1, 1), (1, 1, 2), (1, 1, 4), (2, 1, 2), (2, 1, 4)),
        *((1, 2, 1), (1, 3, 1), (1, 8, 1), (2, 2, 1), (3, 2, 1)),
        *((1, 2, 2), (1, 3, 2), (1, 4, 2), (1, 2, 4), (2, 2, 2)),
    )
}
"""Topology -> degrees of data parallelism, sharding and pipeline parallelism."""

_EVERY_AXIS = _topology_name(2, 2, 2)
"""The topology in which no choice is without company."""

_DEGREE_KEYS = ("data_parallel_degree", "sharding_parallel_degree", "pipeline_parallel_degree")

BY_TENSORS, BY_SLICES = "stage1 by tensors", "stage1 by slices"
FREE_TENSORS, FREE_SLICES = "stage1 by tensors, freed", "stage1 by slices, freed"
UNSHARDED, STAGE2, STAGE3 = "no sharding", "stage2", "stage3"

AXES: Mapping[str, Mapping[str, Keys]] = {
    "topology": {
        name: {key: degree for key, degree in zip(_DEGREE_KEYS, degrees, strict=True) if degree > 1}
        for name, degrees in DEGREES.items()
    },
    "sharding": {
        UNSHARDED: {},
        BY_TENSORS: {"sharding": "stage1"},
        FREE_TENSORS: {"sharding": "stage1", "sharding_parallel_config": "free_grads_in_comm"},
        BY_SLICES: {"sharding": "stage1", "sharding_parallel_config": "split_param"},
        FREE_SLICES: {"sharding": "stage1", "sharding_parallel_config": "split_param free_grads_in_comm"},
        STAGE2: {"sharding": "stage2"},
        STAGE3: {"sharding": "stage3"},
    },
    "gradient_sync": {
        moment: {"gradient_sync": moment} for moment in ("every_micro_batch", "last_micro_batch", "after_accumulation")
    },
    "overlap": {
        "overlapped": {"overlap_gradient_reduction": True},
        "not overlapped": {"overlap_gradient_reduction": False},
    },
    "average": {"sum": {}, "average": {"data_parallel_config": "enable_allreduce_avg_in_gradient_scale"}},
    "loss scale": {"scaled loss": {}, "delayed scale": {"pipeline_parallel_config": "enable_delay_scale_loss"}},
    "release": {"kept": {}, "released": {"release_grads": True}},
    "dtype": {dtype: {"dtype": dtype} for dtype in ("float64", "float32", "bfloat16", "float16")},
    "wire": {"gradients' dtype": {}, "bfloat16 wire": {"gradient_reduce_dtype": "bfloat16"}},
    "k": {f"k={k}": {"gradient_accumulation_steps": k} for k in (1, 3, 4)},
    "tying": {"untied": {}, "tied": {"model_config.tie_word_embeddings": True}},
    "tokens": {"even": {}, "uneven": {}},
}
"""Every axis with its choices. Whether micro-batches have even numbers of valid tokens is up to the data."""

SIDE_AXES: Mapping[str, Mapping[str, Keys]] = {
    "gathers": {"behind the forward": {}, "at once": {"overlap_parameter_gather": False}},
    "schedule": {
        "1F1B": {},
        "FThenB": {"pipeline_schedule_mode": "FThenB"},
        "VPP": {"pipeline_schedule_mode": "VPP", "virtual_pp_degree": 2},
        "ZBH1": {"pipeline_schedule_mode": "ZBH1"},
        "ZBV": {"pipeline_schedule_mode": "ZBV"},
        "DualPipeV": {"pipeline_schedule_mode": "DualPipeV"},
        "ZBH1, two stages a rank": {"pipeline_schedule_mode": "ZBH1", "virtual_pp_degree": 2},
        "FThenB, two stages a rank": {"pipeline_schedule_mode": "FThenB", "virtual_pp_degree": 2},
        "Bounded, one micro-batch": {"pipeline_schedule_mode": "Bounded", "pipeline_activation_limit": 1},
        "BoundedV": {"pipeline_schedule_mode": "BoundedV"},
    },
    "messages": {"when needed": {}, "ahead": {"pipeline_parallel_config": "enable_overlap_p2p_comm"}},
    "order": {"pp first": {}, "sharding first": {"hybrid_parallel_topo_order": "sharding_first"}},
    "optimizer": {name: {"optim": name, "weight_decay": 0.1} for name in ("adamw", "sgd", "adafactor", "muon")},
    "clipping": {"clipped": {}, "unclipped": {"max_grad_norm": 0.0}},
}
"""Axes that are not multiplied out: they meet every choice of every axis, and not every combination."""

_UNSEEN: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "tokens": {"even": ("even", "uneven")},
    "wire": {"gradients' dtype": tuple(AXES["wire"])},
    "dtype": {"float32": ("float64", "float32", "bfloat16"), "float16": ("float16",)},
}
"""Choices between which a program differs in sizes only: the one that stands for them -> those for which it stands."""


def keys_of(choices: Choices) -> Keys:
    """What a user would write; flags of one option are joined."""
    keys: Keys = {}
    for axis, choice in choices.items():
        for key, value in {**AXES, **SIDE_AXES}[axis][choice].items():
            if key.endswith("_parallel_config"):
                keys[key] = f"{keys.get(key, '')} {value}".strip()
            else:
                keys[key] = value
    return keys


def strategy_of(choices: Choices, **others: Any) -> Strategy:
    """Of these choices and other keys. Raises `UserError` for a combination that is refused."""
    model = {"model_config": {"model_type": "llama"}}
    return resolve_strategy(arguments_from_mapping({**model, **keys_of(choices), **others}))


def refusal(choices: Choices) -> UserError | None:
    """Why the combination is refused, if it is."""
    return _refusal(tuple((axis, choices[axis]) for axis in _DECIDING if axis in choices))


_DECIDING = ("topology", "sharding", "gradient_sync", "overlap", "optimizer")
"""On a refusal no other axis has a say."""


@cache
def _refusal(choices: tuple[tuple[str, str], ...]) -> UserError | None:
    try:
        strategy_of(dict(choices))
    except UserError as error:
        return error
    return None


def works(choices: Choices) -> bool:
    """Whether the choices made so far can be part of a combination that has a meaning and is not refused."""
    return has_meaning(choices) and refusal({"topology": _EVERY_AXIS, **choices}) is None


def ranks_of(choices: Choices) -> int:
    dp, sharding, pp = DEGREES[choices["topology"]]
    return dp * sharding * pp


def has_meaning(choices: Choices) -> bool:
    """Whether the choices made so far can be part of a combination of its own.

    Sharding needs a group to divide among, and such a group without sharding is plain data parallelism. Of the side
    axes, what changes nothing in the company of the others is left out.
    """
    dp, sharding, pp = DEGREES[choices.get("topology", _EVERY_AXIS)]
    form = choices.get("sharding")
    if form is not None and "topology" in choices and (form == UNSHARDED) != (sharding == 1):
        return False
    gathers_at_once = choices.get("gathers") == "at once" and (form in (UNSHARDED, STAGE3) or sharding == 1)
    schedule = choices.get("schedule", "1F1B")
    other_schedule = schedule != "1F1B" and (pp == 1 or ("FThenB" in schedule and choices.get("k") == "k=1"))
    other_order = choices.get("order") == "sharding first" and (pp == 1 or dp * sharding == 1)
    messages_ahead = choices.get("messages") == "ahead" and pp == 1
    return not (gathers_at_once or other_schedule or other_order or messages_ahead)


def combinations(**fixed: str) -> Iterator[dict[str, str]]:
    """Every combination that has a meaning or is refused; with the choices in `fixed` made already."""
    choices = [(fixed[axis],) if axis in fixed else tuple(AXES[axis]) for axis in AXES]
    for topology, form in product(*choices[:2]):
        if has_meaning({"topology": topology, "sharding": form}):
            for rest in product(*choices[2:]):
                yield dict(zip(AXES, (topology, form, *rest), strict=True))


@dataclass(frozen=True)
class Counts:
    combinations: int
    refused: int


def counts() -> Counts:
    others = {axis: tuple(AXES[axis]) for axis in AXES if axis not in _DECIDING}
    of_each = prod(map(len, others.values()))
    cases = list(combinations(**{axis: choices[0] for axis, choices in others.items()}))
    return Counts(len(cases) * of_each, sum(refusal(case) is not None for case in cases) * of_each)


# ---- Programs --------------------------------------------------------------------------------------------------------

Sight = tuple[Any, ...]
"""What a program depends on, but for sizes in bytes."""


@dataclass(frozen=True)
class DistinctProgram:
    """One program, and the combinations that run it."""

    strategy: Strategy
    """As one of the combinations resolves."""
    tied: bool
    example: dict[str, str]
    covers: int
    """How many combinations differ from one another in sizes or data only."""


def sight(strategy: Strategy, tied: bool) -> Sight:
    ownership = (strategy.ownership, strategy.shards)
    order = (strategy.schedule, strategy.virtual_stages)
    return strategy.topology, strategy.micro_batches, *order, *ownership, *passes(strategy), tied


def distinct_programs(topologies: Iterable[str] = DEGREES) -> dict[Sight, DistinctProgram]:
    """Every program that the combinations on these topologies amount to, refused ones left out."""
    found: dict[Sight, DistinctProgram] = {}
    for topology in topologies:
        for combination in representatives(topology):
            try:
                strategy = strategy_of(combination)
            except UserError:
                continue
            tied = combination["tying"] == "tied"
            key = sight(strategy, tied)
            before = found[key].covers if key in found else 0
            found[key] = DistinctProgram(strategy, tied, combination, before + _weight(combination))
    return found


def representatives(topology: str) -> Iterator[dict[str, str]]:
    """One of those combinations that differ from one another in sizes or data only."""
    unseen = [[(axis, choice) for choice in standing] for axis, standing in _UNSEEN.items()]
    for fixed in product(*unseen):
        yield from combinations(topology=topology, **dict(fixed))


def representative(combination: Choices) -> dict[str, str]:
    """The one that stands for `combination`."""
    standing = {
        axis: next(name for name, others in _UNSEEN[axis].items() if combination[axis] in others) for axis in _UNSEEN
    }
    return {**combination, **standing}


def _weight(combination: Choices) -> int:
    return prod(len(standing[combination[axis]]) for axis, standing in _UNSEEN.items())
