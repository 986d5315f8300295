"""Which flags of the `*_parallel_config` options act in a job; the others are a warning or a refusal."""

from __future__ import annotations

from syncline.arguments import TrainingArguments
from syncline.arguments.flags import CONFIGS, FLAGS, Flag, Need
from syncline.errors import UserError
from syncline.strategy.topology import Topology


def acting_flags(arguments: TrainingArguments, topology: Topology) -> tuple[frozenset[str], list[str]]:
    """The names of the flags that act, and a sentence for each that does not.

    Raises `UserError` for a flag that has no meaning in Syncline or arrives later, where it would otherwise act.
    """
    given = {name: config for config in CONFIGS for name in getattr(arguments, config)}
    acting, warnings = set(), []
    for flag in FLAGS:
        if flag.name not in given:
            continue
        reason = _why_it_does_nothing(flag, arguments, topology)
        if reason:
            warnings.append(f"{flag.name} has no effect here: {reason}.")
            continue
        _refuse(flag, f"{given[flag.name]}={flag.name}")
        acting.add(flag.name)
    return frozenset(acting), warnings


def _why_it_does_nothing(flag: Flag, arguments: TrainingArguments, topology: Topology) -> str:
    if not is_met(flag.needs, arguments, topology):
        later = f" (it {flag.arrives})" if flag.arrives else ""
        return f"it needs {flag.needs.value}{later}"
    return flag.no_effect


def is_met(need: Need, arguments: TrainingArguments, topology: Topology) -> bool:
    """Whether a job has what a flag needs to act."""
    stages = arguments.sharding if topology.sharding > 1 else ()
    slices = "split_param" in arguments.sharding_parallel_config
    return {
        Need.NOTHING: True,
        Need.REPLICAS: topology.replicas > 1,
        Need.STAGES: topology.pp > 1,
        Need.SHARDING: bool(stages),
        Need.STAGE1: "stage1" in stages,
        Need.BY_TENSORS: "stage1" in stages and not slices,
        Need.BY_SLICES: "stage1" in stages and slices,
        Need.STAGE2: "stage2" in stages,
        Need.SLICES: topology.tp > 1,
    }[need]


def _refuse(flag: Flag, given: str) -> None:
    if flag.arrives:
        raise UserError(given, str(flag.arrives), f"{flag.arrives.instead}.")
    if flag.refused:
        wrong, instead = flag.refused
        raise UserError(given, wrong, f"{instead}.")
