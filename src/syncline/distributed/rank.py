"""Being a rank: under `syncline.distributed.launch`, torchrun or SLURM's srun.

environment = rank_environment()        # None: nobody has started ranks yet
status = run_rank(environment, body)    # where `body` does join(...), the work, leave()
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from syncline.distributed.failures import FailureKind, failure_of, record_failure, report_failures
from syncline.distributed.host_memory import keep_freed_memory
from syncline.errors import UserError

if TYPE_CHECKING:
    import torch

JOIN_SECONDS = 600.0
LAUNCHER_VARIABLE = "SYNCLINE_LAUNCHER_PID"
"""The process that started this rank and reports its failure; set by `syncline.distributed.launch` alone."""


@dataclass(frozen=True)
class RankEnvironment:
    """This process's place in a job that someone else started."""

    rank: int
    world_size: int
    local_rank: int
    """Its index on its machine: which GPU is its own."""
    local_world_size: int
    """How many ranks its machine has."""
    address: str
    """Host name or IP of the machine of rank 0."""
    port: int


def rank_environment(variables: Mapping[str, str] = os.environ) -> RankEnvironment | None:
    """Whether this process is a rank, by the variables of torchrun (and `launch`) or of srun; None if it is not.

    Raises `UserError` when only some of the variables are there, or they contradict each other.
    """
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return _torchrun_environment(variables)
    if "SLURM_PROCID" in variables and variables.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return _slurm_environment(variables)
    return None


def has_launcher() -> bool:
    """Whether `syncline.distributed.launch` started this rank, and has checked and prepared what it needs."""
    return bool(os.environ.get(LAUNCHER_VARIABLE))


def run_rank(environment: RankEnvironment, body: Callable[[], int]) -> int:
    """Run `body`, the whole work of this rank, and return its exit status.

    An exception is recorded for the launcher and ends the process at once, with status 2 for a `UserError` and 1 for
    any other: a peer that waits, or a thread of a communication library, must not keep a failed rank alive. So no code
    after this call, and no `atexit` function, runs then.

    Only rank 0 writes to stdout; the others' goes to stderr. Ctrl-C and SIGTERM end a rank at once even where it waits
    in native code, which a Python handler would not.
    """
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if launcher:
        die_with_parent(int(launcher))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable()
    keep_freed_memory()
    if environment.rank != 0:
        sys.stdout.flush()
        os.dup2(2, 1)
    try:
        return body()
    except Exception as error:
        failure = failure_of(environment.rank, error)
        record_failure(failure)
        if not launcher:
            report_failures([failure], environment.world_size)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2 if failure.kind is FailureKind.REQUEST else 1)


def join(environment: RankEnvironment, device: str, timeout: float = JOIN_SECONDS) -> torch.device:
    """Meet the other ranks in the default process group: NCCL for `cuda`, Gloo for `cpu`; also for a single rank.

    `timeout` in seconds holds for meeting and for every later collective. Returns this rank's device, made the current
    one. Raises `UserError` for a GPU that is not there, and torch's own errors when the others do not come.
    """
    import torch
    import torch.distributed as dist

    assert device in ("cpu", "cuda"), device
    own = torch.device(device)
    if device == "cuda":
        if environment.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"local rank {environment.local_rank} on cuda",
                f"this machine shows {torch.cuda.device_count()} GPUs",
                "Start at most one rank per GPU, or train with device cpu.",
            )
        own = torch.device("cuda", environment.local_rank)
        torch.cuda.set_device(own)
    dist.init_process_group(
        # Numbers that live on the host, such as token counts, are summed there without waiting for the GPU.
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        init_method=f"tcp://{environment.address}:{environment.port}",
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timedelta(seconds=timeout),
        device_id=own if device == "cuda" else None,
    )
    return own


def leave() -> None:
    """Leave the process group, if this rank has joined one."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the process `parent`, which must have started it, ends in whatever way.

    Linux only. Elsewhere a rank whose launcher was killed by SIGKILL ends when it next waits for a peer in vain.
    """
    if sys.platform != "linux":
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was told
        os._exit(1)


def _torchrun_environment(variables: Mapping[str, str]) -> RankEnvironment:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    _require(variables, names, "Start the ranks with torchrun, or unset them to let syncline start local ranks.")
    return _consistent(
        RankEnvironment(
            rank=_number(variables, "RANK"),
            world_size=_number(variables, "WORLD_SIZE"),
            local_rank=_number(variables, "LOCAL_RANK"),
            local_world_size=int(variables.get("LOCAL_WORLD_SIZE", "1")),
            address=variables["MASTER_ADDR"],
            port=_number(variables, "MASTER_PORT"),
        )
    )


def _slurm_environment(variables: Mapping[str, str]) -> RankEnvironment:
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODELIST", "SLURM_JOB_ID")
    _require(variables, names, "Start the ranks with srun, one task per rank.")
    nodes = variables.get("SLURM_STEP_NODELIST") or variables["SLURM_NODELIST"]
    return _consistent(
        RankEnvironment(
            rank=_number(variables, "SLURM_PROCID"),
            world_size=_number(variables, "SLURM_STEP_NUM_TASKS"),
            local_rank=_number(variables, "SLURM_LOCALID"),
            local_world_size=_most_tasks_on_a_node(variables),
            address=_first_host(nodes),
            # Equal on all ranks, different for neighbouring jobs, below the ports that systems hand out by themselves.
            port=15_000 + _number(variables, "SLURM_JOB_ID") % 15_000,
        )
    )


def _most_tasks_on_a_node(variables: Mapping[str, str]) -> int:
    """From a list such as `4(x2),3`: nodes may differ, and the fullest decides what every rank can count on."""
    counts = re.findall(r"(\d+)(?:\(x\d+\))?", variables.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    return max(map(int, counts))


def _first_host(nodes: str) -> str:
    """The first host of a SLURM list: `node[07-09,12],login1` gives `node07`."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def _require(variables: Mapping[str, str], names: Sequence[str], instead: str) -> None:
    missing = [name for name in names if not variables.get(name)]
    if missing:
        present = ", ".join(f"{name}={variables[name]}" for name in names if variables.get(name))
        raise UserError(present, f"this makes the process a rank, but {', '.join(missing)} is missing", instead)


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables[name]
    if not text.isdecimal():
        raise UserError(f"{name}={text}", "it is not a whole number", f"Give {name} a whole number, 0 or more.")
    return int(text)


def _consistent(environment: RankEnvironment) -> RankEnvironment:
    if not 0 < environment.port < 65536:
        raise UserError(
            f"MASTER_PORT={environment.port}",
            "it is no port that ranks could meet at",
            "Start the ranks with torchrun --standalone, or give a port from 1 to 65535.",
        )
    if environment.rank >= environment.world_size:
        raise UserError(
            f"rank {environment.rank} in a world of {environment.world_size}",
            "ranks count from 0 to the world size less one",
            "Correct RANK and WORLD_SIZE, or start the ranks with torchrun.",
        )
    return environment
