"""Which stage owns what, by the model's own pipeline plan, and the cut of a model accordingly.

A plan (transformers' `base_model_pp_plan`) names, in order, the parts of the base model: what comes before the layers,
the list of layers, and what comes after. Only its names and their order are used here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from syncline.arguments.segmentation import UNIFORM, Segmentation
from syncline.errors import UserError
from syncline.modeling.access.order import Uses, block_of, uses_by_registration
from syncline.modeling.freezing import frozen_parameters
from syncline.modeling.pipeline.layer_partition import assign_layers, products_per_token
from syncline.modeling.pipeline.passthrough import Injector, PassThrough
from syncline.modeling.pipeline.stage import Stage, TiedSource
from syncline.program.layout import ParameterSpec


@dataclass(frozen=True)
class SplitPlan:
    """All names are global module names. With one stage nothing is named: it owns everything."""

    stages: int
    before: tuple[str, ...] = ()
    """The modules before the layers: on the first stage."""
    layers: str = ""
    layer_ranges: tuple[range, ...] = ()
    """For each stage the indices of its layers."""
    after: tuple[str, ...] = ()
    """The modules after the layers, and all outside the base model: on the last stage."""

    def stage_of(self, name: str) -> int | None:
        """The stage that owns the module, parameter or buffer `name`; None for what the plan does not name."""
        if self.stages == 1:
            return 0
        if any(_is_within(name, module) for module in self.before):
            return 0
        if any(_is_within(name, module) for module in self.after):
            return self.stages - 1
        if _is_within(name, self.layers) and name != self.layers:
            layer = int(name.removeprefix(self.layers + ".").split(".")[0])
            return next(stage for stage, layers in enumerate(self.layer_ranges) if layer in layers)
        return None


def plan_split(model: PreTrainedModel, stages: int, segmentation: Segmentation = (UNIFORM,)) -> SplitPlan:
    """The plan for cutting `model` into `stages`, its layers divided as `segmentation` says; any model will do for one
    stage.

    Raises `UserError` when the model cannot be cut so.
    """
    assert stages >= 1
    if stages == 1:
        return SplitPlan(1)
    names = _names_in_plan(model, stages)
    lists = [name for name in names if isinstance(model.get_submodule(name), nn.ModuleList)]
    if len(lists) != 1:
        raise _refusal(model, stages, f"its pipeline plan {names} does not name one list of layers")
    position = names.index(lists[0])
    outside = [name for name, child in model.named_children() if child is not model.base_model]
    before, after = tuple(names[:position]), (*names[position + 1 :], *outside)
    layers = list(model.get_submodule(names[position]).children())
    first, last = ([model.get_submodule(name) for name in part] for part in (before, after))
    ranges = assign_layers(layers, first, last, stages, segmentation)
    plan = SplitPlan(stages, before, names[position], ranges, after)
    _refuse_unowned(model, plan)
    _refuse_shared_layers(model, plan)
    return plan


def stage_costs(model: PreTrainedModel, plan: SplitPlan) -> tuple[int, ...]:
    """What each of several stages costs, in multiplications of a forward for one token."""
    layers = [products_per_token(layer) for layer in model.get_submodule(plan.layers).children()]
    costs = [sum(layers[index] for index in indices) for indices in plan.layer_ranges]
    for stage, names in ((0, plan.before), (-1, plan.after)):
        costs[stage] += sum(products_per_token(model.get_submodule(name)) for name in names)
    return tuple(costs)


def specs(
    model: PreTrainedModel,
    plan: SplitPlan,
    freeze_parameters: Sequence[str] = (),
    uses: Uses | None = None,
    all_settings: Mapping[nn.Parameter, int] | None = None,
) -> list[ParameterSpec]:
    """Every parameter of every stage, stage by stage, each in registration order.

    A parameter tied within one stage appears once, under its first name. One tied across stages appears on each of
    them. `freeze_parameters` holds regular expressions, searched for in the global names; `uses` tells when a forward
    of the whole model uses them, by default where they are registered; `all_settings`
    which optimizer settings are theirs, by default the first.

    Raises `UserError` for an expression that is invalid or matches nothing, and when nothing is left to be trained.
    """
    frozen = frozen_parameters(model, freeze_parameters)
    uses = uses_by_registration(model) if uses is None else uses
    places = {parameter: place for place, parameter in enumerate(uses)}
    holders: dict[nn.Parameter, set[int | None]] = {}
    for name, parameter in _all_parameters(model):
        holders.setdefault(parameter, set()).add(plan.stage_of(name))
    first_names: dict[nn.Parameter, str] = {}
    found = []
    for stage in range(plan.stages):
        of_this_stage = set()
        for name, parameter in _all_parameters(model):
            if plan.stage_of(name) != stage or parameter in of_this_stage:
                continue
            of_this_stage.add(parameter)
            first_use, last_use = uses[parameter]
            if len(holders[parameter]) > 1:  # Each copy is used once, on its own stage.
                first_use = last_use = last_use if parameter in first_names else first_use
            found.append(
                ParameterSpec(
                    name,
                    tuple(parameter.shape),
                    stage,
                    settings=all_settings[parameter] if all_settings is not None else 0,
                    tied_to=first_names.get(parameter),
                    frozen=parameter in frozen,
                    block=block_of(name),
                    first_use=first_use,
                    last_use=last_use,
                    # The later copy of a tied parameter is used last of all.
                    order=len(places) if parameter in first_names else places[parameter],
                )
            )
            first_names.setdefault(parameter, name)
    return found


def cut(model: PreTrainedModel, plan: SplitPlan, stage: int) -> Stage:
    """Stage `stage` of `model`, which is left as it is. Both are on the meta device.

    The stage's model is a whole one, with every module that other stages own replaced by a `PassThrough`. Layer indices
    and global names stay.
    """
    own = deepcopy(model)
    for name in (*plan.before, *plan.after):
        if plan.stage_of(name) != stage:
            own.set_submodule(name, PassThrough(own.get_submodule(name)))
    injector = None
    if plan.stages > 1:
        layers = own.get_submodule(plan.layers)
        assert isinstance(layers, nn.ModuleList)
        for index, layer in enumerate(layers):
            if index not in plan.layer_ranges[stage]:
                layers[index] = PassThrough(layer)
        if stage > 0:
            injector = layers[0] = Injector(layers[0])
    return Stage(own, stage, plan.stages, injector, _tied_sources(model, plan, stage), model.state_dict())


def _names_in_plan(model: PreTrainedModel, stages: int) -> list[str]:
    """The global names of the parts that the plan names and the model has, in order."""
    base = model.base_model
    assert isinstance(base, PreTrainedModel)
    if base is model or base.config.is_encoder_decoder or not base._pp_plan:
        raise _refusal(model, stages, "transformers has no pipeline plan for this model")
    return [f"{model.base_model_prefix}.{name}" for name in base._pp_plan if hasattr(base, name)]


def _refuse_unowned(model: PreTrainedModel, plan: SplitPlan) -> None:
    unowned = [name for name, _ in _all_parameters(model) if plan.stage_of(name) is None]
    if unowned:
        raise _refusal(model, plan.stages, f"its pipeline plan names no part that parameter {unowned[0]} belongs to")


def _refuse_shared_layers(model: PreTrainedModel, plan: SplitPlan) -> None:
    """Only what lies before the layers and what lies after them may share parameters across stages."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in _all_parameters(model):
        names.setdefault(parameter, []).append(name)
    for copies in names.values():
        if len({plan.stage_of(name) for name in copies}) > 1 and any(_is_within(name, plan.layers) for name in copies):
            raise _refusal(
                model, plan.stages, f"parameters {' and '.join(copies)} are one, shared by layers on several stages"
            )


def _refusal(model: PreTrainedModel, stages: int, wrong: str) -> UserError:
    return UserError(
        f"{stages} pipeline stages with {type(model).__name__}",
        wrong,
        "Write pipeline_parallel_degree 1 (data parallelism works with every model)",
    )


def _tied_sources(model: PreTrainedModel, plan: SplitPlan, stage: int) -> dict[str, TiedSource]:
    return {
        spec.name: TiedSource(spec.tied_to, deepcopy(model.get_submodule(spec.tied_to.rpartition(".")[0])))
        for spec in specs(model, plan)
        if spec.stage == stage and spec.tied_to is not None
    }


def _all_parameters(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Under every name: a tied parameter comes several times."""
    return model.named_parameters(remove_duplicate=False)


def _is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")
