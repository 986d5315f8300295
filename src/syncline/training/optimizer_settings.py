"""Which parameters are updated by which settings: by their kind, and by the user's parameter groups."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from syncline.arguments import TrainingArguments
from syncline.arguments.parameter_groups import ParameterGroup
from syncline.errors import UserError
from syncline.modeling.freezing import frozen_parameters
from syncline.runtime.optimization.optimizer import OptimizerSettings


@dataclass(frozen=True)
class SettingsOfParameters:
    """The distinct all_settings of a job, and which of them updates what."""

    all_settings: tuple[OptimizerSettings, ...]
    """What `ParameterSpec.settings` counts."""
    of_parameter: Mapping[nn.Parameter, int]
    """For every parameter of the model, frozen ones included, the index of its settings."""
    warnings: tuple[str, ...] = ()
    """Sentences for the user: groups that have no effect."""


def optimizer_settings(model: PreTrainedModel, arguments: TrainingArguments) -> SettingsOfParameters:
    """The settings of every parameter of `model`; equal all_settings are one.

    A parameter is updated by the first of `parameter_groups` whose pattern is found in its global name, a tied one in
    any of its names, and by the run's own settings where no group says otherwise. These decay matrices and nothing
    else. Under muon only the matrices that `muon_matrices` names are updated by it, and all else by adamw.

    Raises `UserError` for a pattern that matches nothing, or nothing that earlier groups have left, for a group's
    learning rate in a run whose own is 0, and for what is wrong with `freeze_parameters`.
    """
    groups = [ParameterGroup(**group) for group in arguments.parameter_groups]
    _refuse_rates_without_schedule(groups, arguments)
    members = group_members(model, arguments.parameter_groups)
    _refuse_empty(model, groups, members)
    group_of = {parameter: group for group, own in zip(groups, members, strict=True) for parameter in own}
    matrices = muon_matrices(model) if arguments.optim == "muon" else set()
    places: dict[OptimizerSettings, int] = {}
    of_parameter = {}
    for parameter in model.parameters():
        kind = "adamw" if arguments.optim == "muon" and parameter not in matrices else arguments.optim
        settings = _settings(arguments, kind, parameter, group_of.get(parameter))
        of_parameter[parameter] = places.setdefault(settings, len(places))
    return SettingsOfParameters(tuple(places), of_parameter, tuple(_warnings(model, arguments, members)))


def group_members(model: PreTrainedModel, groups: Sequence[Mapping[str, Any]]) -> list[set[nn.Parameter]]:
    """What each of `parameter_groups` decides: the parameters that its pattern finds and no earlier one has found."""
    left = set(model.parameters())
    members = []
    for group in groups:
        members.append(_found(model, group["pattern"]) & left)
        left -= members[-1]
    return members


def muon_matrices(model: PreTrainedModel) -> set[nn.Parameter]:
    """The parameters with two dimensions inside the layers, without any that is an embedding or the head.

    A layer is an element of a list of modules. Experts that are stored together, in three dimensions, are not among
    them.
    """
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    ends = [*tables, model.get_input_embeddings(), model.get_output_embeddings()]
    outside = {parameter for module in ends if module is not None for parameter in module.parameters()}
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inside = {parameter for layers in lists for parameter in layers.parameters()}
    return {parameter for parameter in inside - outside if parameter.dim() == 2}


def _settings(
    arguments: TrainingArguments, kind: str, parameter: nn.Parameter, group: ParameterGroup | None
) -> OptimizerSettings:
    weight_decay = arguments.weight_decay if parameter.dim() >= 2 else 0.0
    learning_rate = 1.0
    if group is not None and group.weight_decay is not None:
        weight_decay = group.weight_decay
    if group is not None and group.learning_rate is not None:
        learning_rate = group.learning_rate / arguments.learning_rate
    return OptimizerSettings(
        kind=kind,
        weight_decay=weight_decay,
        learning_rate=learning_rate,
        beta1=arguments.adam_beta1,
        beta2=arguments.adam_beta2,
        epsilon=arguments.adafactor_epsilon if kind == "adafactor" else arguments.adam_epsilon,
        momentum=arguments.muon_momentum,
    )


def _found(model: PreTrainedModel, pattern: str) -> set[nn.Parameter]:
    named = model.named_parameters(remove_duplicate=False)
    return {parameter for name, parameter in named if re.search(pattern, name)}


def _warnings(
    model: PreTrainedModel, arguments: TrainingArguments, members: Sequence[set[nn.Parameter]]
) -> Iterator[str]:
    frozen = frozen_parameters(model, arguments.freeze_parameters)
    for number, own in enumerate(members, start=1):
        if own <= frozen:
            yield f"Entry {number} of parameter_groups has no effect here: all that it decides is frozen."


def _refuse_rates_without_schedule(groups: Sequence[ParameterGroup], arguments: TrainingArguments) -> None:
    if arguments.learning_rate == 0 and any(group.learning_rate is not None for group in groups):
        raise UserError(
            "learning_rate=0 and a learning_rate in parameter_groups",
            "a group follows the run's learning rate by a factor, and the run's is always 0",
            "Write the learning_rate of most parameters for the run, and learning_rate: 0 in the groups that stay",
        )


def _refuse_empty(
    model: PreTrainedModel, groups: Sequence[ParameterGroup], members: Sequence[set[nn.Parameter]]
) -> None:
    for number, (group, own) in enumerate(zip(groups, members, strict=True), start=1):
        if own:
            continue
        given = f"entry {number} of parameter_groups, pattern {group.pattern!r}"
        found = _found(model, group.pattern)
        if not found:
            names = [name for name, _ in model.named_parameters()]
            raise UserError(given, "it matches no parameter", f"Parameters have names such as {names[0]}")
        earlier = next(place for place, others in enumerate(members, start=1) if others & found)
        raise UserError(
            given,
            f"earlier entries match all that it matches (entry {earlier}, pattern {groups[earlier - 1].pattern!r}), "
            "and the first match decides",
            "Move it before them, or make their patterns narrower",
        )
