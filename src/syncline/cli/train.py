"""`syncline train`: checks everything, starts the local ranks; or, where someone else has started ranks, is one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import as_file, files
from typing import TYPE_CHECKING

from syncline.arguments import TrainingArguments, load_arguments
from syncline.cli.command_line import split_command_line
from syncline.distributed.rank import RankEnvironment, has_launcher, join, leave, rank_environment, run_rank
from syncline.errors import UserError

if TYPE_CHECKING:
    from syncline.training.job import Job


def train(argv: Sequence[str]) -> int:
    """Run the command with the words after `train`; returns the exit status."""
    environment = rank_environment()
    if environment is not None:
        return run_rank(environment, lambda: _train_as_rank(environment, argv))
    arguments = _load(argv)
    if arguments.world_size not in (None, arguments.nproc_per_node):
        raise UserError(
            f"world_size {arguments.world_size}",
            "train starts its ranks on this machine only, as many as nproc_per_node or the degrees say",
            "Write nproc_per_node, or start the ranks with torchrun",
        )
    processes = _prepare(arguments)
    from syncline.distributed.launch import launch

    return launch(["-m", "syncline", "train", *argv], processes)


def _load(argv: Sequence[str]) -> TrainingArguments:
    split = split_command_line(argv)
    if split.config is not None:
        return load_arguments(split.config, split.overrides)
    with as_file(files("syncline.cli") / "demonstration.yaml") as demonstration:
        return load_arguments(demonstration, split.overrides)


def _prepare(arguments: TrainingArguments) -> int:
    """Everything that can go wrong, before any process starts; returns how many to start."""
    job = _checked_job(arguments, warn=True)
    _warn_of_device(job, choose_device(arguments, job.strategy.topology.world_size))
    from syncline.training.samples import prepare_samples

    prepare_samples(arguments, job.config)
    _claim_folder(job)
    return job.strategy.topology.world_size


def _checked_job(arguments: TrainingArguments, *, warn: bool) -> Job:
    from syncline.training.job import check_model, describe_job

    job = describe_job(arguments)
    for warning in job.strategy.warnings if warn else ():
        print(f"syncline: warning: {warning}", file=sys.stderr)
    for note in job.notes if warn else ():
        print(f"syncline: {note}", file=sys.stderr)
    check_model(job)
    return job


def _warn_of_device(job: Job, kind: str) -> None:
    """What only the machine can show to be of no use."""
    if kind == "cpu" and job.strategy.offload_activations:
        print(
            "syncline: warning: offload_activations saves nothing here: training runs on the CPU, and activations are "
            "in host memory already.",
            file=sys.stderr,
        )


def _claim_folder(job: Job) -> None:
    from syncline.program.display.text import to_json
    from syncline.training.run_folder import RunFolder

    folder = RunFolder.of(job.arguments)
    folder.claim(job.arguments)
    folder.write_request(job.arguments, to_json(job.program))


def choose_device(arguments: TrainingArguments, local_ranks: int) -> str:
    """`cuda` or `cpu`, as told; by itself, cuda where every local rank has a GPU of its own.

    Raises:
        UserError: for cuda without enough GPUs.
    """
    import torch

    gpus = torch.cuda.device_count()
    if arguments.device == "cuda" and gpus < local_ranks:
        raise UserError(
            f"device cuda with {local_ranks} local ranks",
            f"this machine shows {gpus} GPUs",
            "Write device: cpu, or start fewer ranks",
        )
    if arguments.device != "auto":
        return arguments.device
    return "cuda" if gpus >= local_ranks else "cpu"


def _train_as_rank(environment: RankEnvironment, argv: Sequence[str]) -> int:
    arguments = replace(_load(argv), world_size=environment.world_size)
    from syncline.training.job import describe_job
    from syncline.training.samples import prepare_samples
    from syncline.training.summary import summary_lines
    from syncline.training.trainer import Trainer

    is_main = environment.rank == 0
    job = describe_job(arguments) if has_launcher() else _checked_job(arguments, warn=is_main)
    data = prepare_samples(arguments, job.config)
    kind = choose_device(arguments, environment.local_world_size)
    if is_main and not has_launcher():
        _warn_of_device(job, kind)
    device = join(environment, kind, arguments.distributed_timeout_seconds)
    if is_main and not has_launcher():
        _claim_folder(job)
    trainer = Trainer(job, data, environment.rank, device)
    evaluation = trainer.train()
    trainer.export()
    trainer.write_reports()
    if is_main and trainer.last_result is not None:
        print("\n".join(summary_lines(job, trainer.state, trainer.last_result, trainer.folder, evaluation)))
    leave()
    return 0
