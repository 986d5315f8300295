"""A job: the strategy, the model's layout and the program that follow from the arguments. No process is needed to make
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from transformers import PretrainedConfig, PreTrainedModel

from syncline.arguments import TrainingArguments
from syncline.checkpoint.weights import local_folder
from syncline.errors import UserError
from syncline.modeling.access.order import uses_in_forward
from syncline.modeling.checks import check_isolation, check_split
from syncline.modeling.kernels.linear import share_left_to_autograd
from syncline.modeling.load import build_meta_model, resolve_config
from syncline.modeling.pipeline.split import SplitPlan, plan_split, specs, stage_costs
from syncline.program.analysis.best_schedule import best
from syncline.program.analysis.simulation import Costs
from syncline.program.build import ITEMSIZE, build_program
from syncline.program.layout import ParameterLayout, lay_out
from syncline.program.program import Program
from syncline.program.verification.verify import verify
from syncline.runtime.optimization.optimizer import OptimizerSettings
from syncline.schedules import BEST
from syncline.strategy import Strategy
from syncline.strategy.resolve import held_between_halves_warnings, resolve_strategy
from syncline.training.optimizer_settings import optimizer_settings

MOST_LEFT_TO_AUTOGRAD = 0.2
"""The largest share of a model's weights in layers whose backward cannot be halved that goes without saying."""

_RECOMPUTED = {"full": 1.0, "full_attn": 1 / 3}
"""Which share of a layer's products is computed again, by `recompute_granularity`; of attention roughly."""

ChangeModel = Callable[[PreTrainedModel], None]


@dataclass(frozen=True)
class Job:
    """Everything that all ranks agree on before they meet."""

    arguments: TrainingArguments
    strategy: Strategy
    config: PretrainedConfig
    meta_model: PreTrainedModel
    """The whole model, without memory."""
    split: SplitPlan
    layout: ParameterLayout
    optimizer_settings: tuple[OptimizerSettings, ...]
    """What `ParameterSpec.settings` counts: how parameters are updated."""
    program: Program
    notes: tuple[str, ...] = ()
    """What has been decided that no option says."""


def describe_job(
    arguments: TrainingArguments,
    *,
    config: PretrainedConfig | None = None,
    strategy: Strategy | None = None,
    change_model: ChangeModel | None = None,
) -> Job:
    """Resolve, lay out, build and verify.

    `config` and `strategy` stand in for those that the arguments name; `change_model` is applied to the model on the
    meta device before it is laid out.

    Raises:
        UserError: for whatever in the arguments or the model cannot work.
        Violation: if the program is wrong, which is never the user's doing.
    """
    strategy = strategy or resolve_strategy(arguments)
    config = config or resolve_config(arguments.model_name_or_path, arguments.model_config)
    meta_model = build_meta_model(config, arguments.attn_implementation)
    if change_model is not None:
        change_model(meta_model)
    strategy, notes = choose_schedule(strategy, arguments, meta_model)
    split = plan_split(meta_model, strategy.placement.stages, arguments.pp_seg_method)
    uses = uses_in_forward(meta_model) if strategy.shards > 1 else None
    settings = optimizer_settings(meta_model, arguments)
    strategy = replace(strategy, warnings=(*strategy.warnings, *settings.warnings))
    parameter_specs = specs(meta_model, split, arguments.freeze_parameters, uses, settings.of_parameter)
    layout = lay_out(
        parameter_specs,
        bucket_bytes=strategy.bucket_bytes,
        gradient_itemsize=ITEMSIZE[strategy.gradient_dtype],
        ownership=strategy.ownership,
        shards=strategy.shards,
        divide_parameters=strategy.divides_parameters,
    )
    program = build_program(strategy, layout, activation_bytes=activation_bytes(arguments, strategy, config))
    verify(program)
    strategy = replace(strategy, warnings=(*strategy.warnings, *_halving_warnings(program, meta_model)))
    return Job(arguments, strategy, config, meta_model, split, layout, settings.all_settings, program, notes)


def choose_schedule(
    strategy: Strategy, arguments: TrainingArguments, model: PreTrainedModel
) -> tuple[Strategy, tuple[str, ...]]:
    """The strategy with a schedule in the place of `BEST`, and what there is to say of the choice.

    Raises `UserError` when the model cannot be divided into stages.
    """
    if strategy.schedule != BEST:
        return strategy, ()

    def costs_of(stages: int) -> Costs | None:
        try:
            costs = stage_costs(model, plan_split(model, stages, arguments.pp_seg_method))
        except UserError:
            return None
        # In forwards through the layers of a rank that has its share of all costs.
        share = strategy.topology.pp / sum(costs)
        again = _RECOMPUTED[arguments.recompute_granularity] / arguments.recompute_interval * arguments.recompute
        return Costs(backward_input=1.0 + again, stages=tuple(cost * share for cost in costs))

    chosen = best(strategy, costs_of)
    if chosen is None:  # Then it cannot be divided into this number either, which says why.
        plan_split(model, strategy.placement.stages, arguments.pp_seg_method)
    assert chosen is not None
    note = (
        f"pipeline_schedule_mode best is {chosen.title}: a simulated step takes {chosen.time:.1f} forwards through a "
        f"rank's layers, of which computations take {chosen.busy:.1f}; a rank holds the activations of "
        f"{chosen.activations:g} micro-batches{', in host memory' if strategy.offload_activations else ''}"
    )
    held = held_between_halves_warnings(arguments, chosen.strategy.schedule, offloads=strategy.offload_activations)
    warnings = (*strategy.warnings, *held)
    return replace(chosen.strategy, warnings=warnings), (note,)


def _halving_warnings(program: Program, model: PreTrainedModel) -> Iterator[str]:
    left = share_left_to_autograd(model) if program.halves_backwards else 0.0
    if left > MOST_LEFT_TO_AUTOGRAD:
        yield (
            f"Halving backwards gains little here: {left:.0%} of the weights of {type(model).__name__} are in layers "
            "other than nn.Linear and nn.Embedding. Their gradients are computed in the first half of a backward, and "
            "held until the second one."
        )


def check_model(job: Job) -> None:
    """Raise `UserError` if the model's weights cannot be had, or its kind cannot do what the job wants of it.

    Fetches a hub model's weights; tries a tiny model of the kind where it is to be cut, or to keep documents apart.
    """
    if job.arguments.model_name_or_path is not None:
        local_folder(job.arguments.model_name_or_path)
    arguments = job.arguments
    check_split(job.config, job.strategy.placement.stages, arguments.attn_implementation)
    if arguments.isolate_documents:
        rows = max(arguments.per_device_train_batch_size, arguments.per_device_eval_batch_size)
        check_isolation(job.config, arguments.attn_implementation, rows)


def activation_bytes(arguments: TrainingArguments, strategy: Strategy, config: PretrainedConfig) -> int:
    """Bytes of one micro-batch's hidden states."""
    tokens = arguments.per_device_train_batch_size * arguments.max_seq_length
    return tokens * int(config.get_text_config().hidden_size) * ITEMSIZE[strategy.parameter_dtype]


def in_float64(strategy: Strategy) -> Strategy:
    """The same decisions with every number in float64, where rounding cannot hide a mistake."""
    return replace(strategy, parameter_dtype="float64", gradient_dtype="float64", reduce_dtype="float64")
