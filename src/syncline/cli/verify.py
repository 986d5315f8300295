"""`syncline verify`: the numerical law on this configuration, on small shapes, with real ranks on this machine."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from syncline.arguments import load_arguments
from syncline.cli.command_line import require_config, split_command_line
from syncline.distributed.rank import RankEnvironment, join, leave, rank_environment, run_rank
from syncline.errors import UserError

if TYPE_CHECKING:
    from syncline.verification.numerical import Report

MOST_RANKS = 64


def verify(argv: Sequence[str]) -> int:
    """Run the command with the words after `verify`; returns the exit status."""
    environment = rank_environment()
    if environment is not None:
        return run_rank(environment, lambda: _verify_as_rank(environment, argv))
    split = split_command_line(argv, switches=("json",))
    arguments = load_arguments(require_config(split, "verify"), split.overrides)
    from syncline.distributed.launch import launch
    from syncline.training.job import check_model
    from syncline.verification.numerical import verification_job

    job = verification_job(arguments)
    for note in job.notes:
        print(f"syncline: {note}", file=sys.stderr)
    check_model(job)
    world_size = job.strategy.topology.world_size
    if world_size > MOST_RANKS:
        raise UserError(
            f"verify with {world_size} ranks",
            f"every rank is a process on this machine, and at most {MOST_RANKS} are started",
            "Lower the degrees for the check, for example --data_parallel_degree 2",
        )
    return launch(["-m", "syncline", "verify", *argv], world_size, threads_per_rank=1)


def _verify_as_rank(environment: RankEnvironment, argv: Sequence[str]) -> int:
    split = split_command_line(argv, switches=("json",))
    arguments = load_arguments(require_config(split, "verify"), split.overrides)
    arguments = replace(arguments, world_size=environment.world_size)
    from syncline.verification.numerical import verify_rank

    device = join(environment, "cpu", arguments.distributed_timeout_seconds)
    report = verify_rank(arguments, environment.rank, device)
    leave()
    if environment.rank == 0:
        verdict = "passed" if report.passed else "FAILED"
        text = (
            f"{verdict}: {report.parameters} parameters on {environment.world_size} ranks after {report.steps} steps; "
            f"largest relative error {report.max_relative_error:.2e} (tolerance {report.tolerance:.0e}) in "
            f"{report.worst_parameter} on rank {report.worst_rank}"
        )
        print(_json(report) if "json" in split.options else text, flush=True)
    return 0 if report.passed else 1


def _json(report: Report) -> str:
    """The report as JSON, which knows no infinity: an error that is not finite is null."""
    document = asdict(report)
    if not math.isfinite(report.max_relative_error):
        document["max_relative_error"] = None
    return json.dumps(document, allow_nan=False)
