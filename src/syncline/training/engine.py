"""From a job to one rank's worker: the stages' memory, the process groups, the buckets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import nn

from syncline.checkpoint.weights import load_weights, local_folder
from syncline.modeling.kernels.gated_mlp import fuse_gated_mlps
from syncline.modeling.kernels.norm import fuse_norms
from syncline.modeling.materialise import materialise
from syncline.modeling.pipeline.split import cut
from syncline.modeling.pipeline.stage import Stage
from syncline.modeling.recompute import enable_recompute
from syncline.program.build import build_forward_program
from syncline.program.program import Program
from syncline.program.verification.verify import verify
from syncline.runtime.communication.collectives import Collectives
from syncline.runtime.communication.point_to_point import Transport
from syncline.runtime.worker import Worker
from syncline.training.job import Job

EVALUATION_MICRO_BATCHES = 4
"""Micro-batches in flight through the pipeline at a time when nothing is trained."""


@dataclass(frozen=True)
class Engine:
    """One rank, ready to run."""

    stages: tuple[Stage, ...]
    """In the order of the model."""
    worker: Worker
    evaluation_program: Program
    """`EVALUATION_MICRO_BATCHES` forwards through all stages."""
    prediction_program: Program
    """One forward through all stages."""

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank holds, by global name."""
        return {name: parameter for stage in self.stages for name, parameter in stage.parameters_by_name().items()}

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Meanwhile modules behave as in an evaluation: nothing is dropped out."""
        for stage in self.stages:
            stage.eval()
        yield
        for stage in self.stages:
            stage.train()


def start_engine(job: Job, rank: int, device: torch.device) -> Engine:
    """Build this rank's stages and worker; all ranks of the default process group call it together.

    Raises:
        UserError: when weights cannot be loaded, or the model cannot do what is asked of it.
    """
    strategy, arguments, program = job.strategy, job.arguments, job.program
    # What models draw themselves (dropout) differs between replicas and stages, and follows from the seed.
    torch.manual_seed(arguments.seed + (rank << 32))
    timeout = timedelta(seconds=arguments.distributed_timeout_seconds)
    stages = tuple(build_stage(job, stage, device) for stage in program.stages(rank))
    evaluation, prediction = (
        build_forward_program(strategy, job.layout, micro_batches, activation_bytes=program.sizes.activation_bytes)
        for micro_batches in (EVALUATION_MICRO_BATCHES, 1)
    )
    for forwards in (evaluation, prediction):
        verify(forwards, updates=False)
    reduce_dtype = getattr(torch, strategy.reduce_dtype)
    programs = [program, evaluation, prediction]
    collectives = Collectives(programs, rank, reduce_dtype, timeout)
    transport, evaluation_transport = (
        Transport(those, strategy.shape_exchange, device, collectives.traffic, timeout)
        for those in ([program], [evaluation, prediction])
    )
    worker = Worker(
        rank,
        {stage.index: stage for stage in stages},
        program,
        collectives,
        transport,
        gradient_dtype=getattr(torch, strategy.gradient_dtype),
        all_settings=job.optimizer_settings,
        max_gradient_norm=arguments.max_grad_norm,
        device=device,
        loss_scale=arguments.scale_loss if strategy.scales_loss else 1.0,
        timers=strategy.timers,
        evaluation_transport=evaluation_transport,
    )
    return Engine(stages, worker, evaluation, prediction)


def build_stage(job: Job, index: int, device: torch.device) -> Stage:
    """Stage `index` in memory: weights from the model's folder, or random ones when the job names only a config."""
    stage = cut(job.meta_model, job.split, index)
    folder = job.arguments.model_name_or_path
    dtype = getattr(torch, job.strategy.parameter_dtype)
    materialise(stage, dtype=dtype, device=device, seed=job.arguments.seed, random_weights=folder is None)
    if folder is not None:
        load_weights(local_folder(folder), stage)
    if job.arguments.recompute:
        enable_recompute(stage.model, job.arguments.recompute_granularity, job.arguments.recompute_interval)
    frozen = {spec.name for spec in job.layout.specs if spec.stage == index and spec.frozen}
    for name, parameter in stage.parameters_by_name().items():
        parameter.requires_grad_(name not in frozen)
    # Last: what a stage is cut and initialised from must have its own forwards.
    fuse_norms(stage)
    fuse_gated_mlps(stage)
    return stage.train()
