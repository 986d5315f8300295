"""One rank's part in `syncline verify`: train its share of hard batches, and compare every parameter with the
reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from syncline.arguments import TrainingArguments
from syncline.arguments.parameter_groups import ParameterGroup
from syncline.arguments.segmentation import UNIFORM
from syncline.modeling.load import build_meta_model, portable_attention, resolve_config
from syncline.modeling.materialise import materialise
from syncline.modeling.pipeline.split import plan_split
from syncline.modeling.shrink import shrink_config
from syncline.runtime.worker import StepResult
from syncline.schedules import BEST
from syncline.strategy import Normalization
from syncline.strategy.resolve import resolve_strategy
from syncline.training.engine import Engine, start_engine
from syncline.training.job import Job, choose_schedule, describe_job, in_float64
from syncline.training.optimizer_settings import group_members, optimizer_settings
from syncline.verification.batches import ROWS, SEQUENCE, GlobalBatch, hard_global_batch
from syncline.verification.double import InFloat64, recompute_in_float64
from syncline.verification.freezing import small_patterns
from syncline.verification.probes import add_probes
from syncline.verification.randomness import silence_dropouts, without_randomness
from syncline.verification.reference import ReferenceGroup, ReferenceRun, ReferenceSettings, run_reference

STEPS = 3
TOLERANCE = 1e-10
"""For every optimizer. PyTorch's muon iterates in bfloat16 even for float64 parameters, which amplifies differences of
its input without bound; but it begins by rounding that input to bfloat16, and equal inputs give equal bits. Gradients
that agree to 1e-15 round apart only next to a tie between two bfloat16 numbers: about one matrix of 64 by 64 in 10^9.
Such a matrix would differ by 1e-2 and fail, with this seed on this machine always.
"""
LEARNING_RATE = 1e-2
"""Large, so that after a few steps the updates are as large as the parameters."""
CLIPPED_NORM = 0.05
"""Small, so that clipping acts in every step when it is on."""
BUCKET_BYTES = 10_000
"""Small, so that every stage has several buckets."""
EPSILON = 1e-6
"""Adam's and adafactor's epsilon: with a smaller one, the rounding of gradients that are 0 in exact arithmetic would
fill the tolerance.
"""
SMALLEST_SCALE = 1e-4
"""Differences are relative to no less. Attention ignores a key's bias: where it starts at zero, all of it is rounding,
different in every order of summation.
"""


@dataclass(frozen=True)
class Report:
    """What `syncline verify` found, over all ranks."""

    passed: bool
    parameters: int
    """Compared parameters, summed over ranks."""
    max_relative_error: float
    """The largest difference, relative to the largest reference value of the parameter (or of the loss or norm),
    but no less than `SMALLEST_SCALE`; infinite when something is not a number.
    """
    worst_parameter: str
    worst_rank: int
    tolerance: float
    steps: int


def verification_job(arguments: TrainingArguments) -> Job:
    """The user's configuration on small shapes, in float64, with parameters that some or all samples leave unused, at
    least one that is frozen (see `small_patterns`), the parameter groups that find something in the small model, and
    nothing random.

    The user's attention is used where it computes on the CPU in float64, `eager` elsewhere. Raises `UserError` for
    whatever in the arguments or the model cannot work, patterns that match nothing in the full model included.
    """
    full_config = resolve_config(arguments.model_name_or_path, arguments.model_config)
    attention = portable_attention(arguments.attn_implementation)
    strategy = resolve_strategy(arguments)
    notes: tuple[str, ...] = ()
    if strategy.schedule == BEST:  # As for the full model: the small one has other stages.
        strategy, notes = choose_schedule(strategy, arguments, build_meta_model(full_config, attention))
    strategy = replace(in_float64(strategy), bucket_bytes=BUCKET_BYTES)
    # One layer more than stages, so that stages differ in size.
    config = without_randomness(shrink_config(full_config, strategy.placement.stages + 1))
    if arguments.freeze_parameters or arguments.parameter_groups:
        # Refused as training would refuse them: the small model has other layers.
        optimizer_settings(build_meta_model(full_config, attention), arguments)
    if strategy.placement.stages > 1:
        # The same for the layers of its stages.
        plan_split(build_meta_model(full_config, attention), strategy.placement.stages, arguments.pp_seg_method)
    small_model = _small_model(config, attention)
    small_groups = zip(arguments.parameter_groups, group_members(small_model, arguments.parameter_groups), strict=True)
    small = replace(
        arguments,
        per_device_train_batch_size=ROWS,
        max_seq_length=SEQUENCE,
        model_name_or_path=None,
        # Numbers of layers are those of the full model.
        pp_seg_method=(UNIFORM,),
        max_grad_norm=CLIPPED_NORM if arguments.max_grad_norm > 0 else 0.0,
        adam_epsilon=max(arguments.adam_epsilon, EPSILON),
        adafactor_epsilon=max(arguments.adafactor_epsilon, EPSILON),
        attn_implementation=attention,
        freeze_parameters=small_patterns(arguments.freeze_parameters, small_model),
        parameter_groups=tuple(group for group, members in small_groups if members),
    )
    job = describe_job(small, config=config, strategy=strategy, change_model=_prepare)
    return replace(job, notes=notes)


def verify_rank(arguments: TrainingArguments, rank: int, device: torch.device) -> Report:
    """Run this rank's share, compare, and gather every rank's verdict; called by all ranks together."""
    job = verification_job(arguments)
    topology = job.strategy.topology
    vocabulary = int(job.config.get_text_config().vocab_size)
    steps = [
        hard_global_batch(arguments.seed, step, topology.replicas, job.strategy.micro_batches, vocabulary)
        for step in range(STEPS)
    ]
    with InFloat64():
        engine = start_engine(job, rank, device)
        for stage in engine.stages:
            recompute_in_float64(stage)
        results = [engine.worker.step(_own(job, batch, rank, device), learning_rate(job)) for batch in steps]
        with engine.worker.parameters.whole():
            return _gather(rank, *_compare(engine, results, reference_run(job, steps)))


def reference_run(job: Job, steps: list[GlobalBatch]) -> ReferenceRun:
    """One process on the whole of each global batch, on the CPU."""
    arguments = job.arguments
    model = _small_model(job.config, arguments.attn_implementation)
    materialise(model, dtype=torch.float64, device="cpu", seed=arguments.seed)
    frozen = {spec.name for spec in job.layout.specs if spec.frozen}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    settings = ReferenceSettings(
        arguments.optim,
        learning_rate(job),
        arguments.weight_decay,
        (arguments.adam_beta1, arguments.adam_beta2),
        arguments.adafactor_epsilon if arguments.optim == "adafactor" else arguments.adam_epsilon,
        arguments.muon_momentum,
        arguments.max_grad_norm,
        job.strategy.normalization is Normalization.MICRO_BATCH_MEAN,
        tuple(_reference_group(arguments, ParameterGroup(**group)) for group in arguments.parameter_groups),
    )
    return run_reference(model.train(), steps, settings)


def learning_rate(job: Job) -> float:
    """The run's: such that the fastest parameters have `LEARNING_RATE`."""
    return LEARNING_RATE / max(1.0, *(settings.learning_rate for settings in job.optimizer_settings))


def _reference_group(arguments: TrainingArguments, group: ParameterGroup) -> ReferenceGroup:
    factor = 1.0 if group.learning_rate is None else group.learning_rate / arguments.learning_rate
    return ReferenceGroup(group.pattern, factor, group.weight_decay)


def _small_model(config: PreTrainedConfig, attention: str | None) -> PreTrainedModel:
    """As the job lays it out and the reference trains it, on the meta device."""
    model = build_meta_model(config, attention)
    _prepare(model)
    return model


def _prepare(model: PreTrainedModel) -> None:
    add_probes(model)
    silence_dropouts(model)


def _own(job: Job, batch: GlobalBatch, rank: int, device: torch.device) -> list:
    replica = job.strategy.topology.replica(rank)
    return [batch[replica, index].to(device) for index in range(job.strategy.micro_batches)]


def _compare(engine: Engine, results: list[StepResult], reference: ReferenceRun) -> tuple[float, str, int]:
    """The largest relative error on this rank, whose it is, and how many parameters were compared."""
    own: Mapping[str, Tensor] = engine.parameters_by_name()
    errors = {name: _relative(own[name].detach().cpu(), reference.parameters[name].detach()) for name in own}
    for step, result in enumerate(results):
        assert result.gradient_norm is not None
        loss, norm = torch.tensor([reference.losses[step], reference.gradient_norms[step]], dtype=torch.float64)
        errors[f"loss of step {step}"] = _relative(result.loss.cpu(), loss)
        errors[f"gradient norm of step {step}"] = _relative(result.gradient_norm.cpu(), norm)
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst, len(own)


def _relative(value: Tensor, reference: Tensor) -> float:
    difference = (value.double() - reference.double()).abs().max()
    error = float(difference / reference.double().abs().max().clamp(min=SMALLEST_SCALE))
    return math.inf if math.isnan(error) else error


def _gather(rank: int, error: float, worst: str, parameters: int) -> Report:
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, (error, worst, rank, parameters))
    error, worst, rank, _ = max(found, key=lambda entry: entry[0])
    return Report(error <= TOLERANCE, sum(entry[3] for entry in found), error, worst, rank, TOLERANCE, STEPS)
