"""The process that peers of one rank are forked from, and what they do then. Started by `processes.py`.

The host imports what all peers import, and does nothing more: so peers start quickly, and what they do not change of it
is in memory once. It reads on stdin which peer to fork. A peer joins the process group of its own kind, and then waits
in a read for one request after the other; while it waits it holds no memory but its own.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn

from against_ddp import ACCUMULATION, REFERENCE
from kernel import anonymous_bytes, peak_anonymous_bytes, restart_peak_resident_bytes, sent_bytes
from peers.catalogue import PEERS
from peers.messages import receive, send
from syncline.data.batch import MicroBatch
from syncline.distributed.rank import die_with_parent
from syncline.errors import UserError
from trainers import MAX_GRADIENT_NORM, Trainer, build_model, fused_adamw, mean_loss

TINY = replace(
    REFERENCE, model_config={**REFERENCE.model_config, "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 256}
)
"""The same kind of model, of a size that does not matter."""

STEPS_PER_TURN = 2
QUIET_SECONDS = 0.2

LIBC = ctypes.CDLL(None)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGE_BLOCK = 64 * 1024
"""Bytes."""


def main() -> None:
    die_with_parent(os.getppid())
    # Where memory runs out none the less, the kernel shall take it from here, not from somebody else's work.
    Path("/proc/self/oom_score_adj").write_text("500")
    build_model(TINY)  # which imports what belongs to the model
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets peers that have ended
    host = os.getpid()
    while (request := receive(sys.stdin)) is not None:
        if os.fork() == 0:
            _become_peer(request, host)


def _become_peer(request: Mapping[str, Any], host: int) -> None:
    """Never returns."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent(host)
        _write_to(request["log"])
        os.environ["MASTER_PORT"] = str(request["port"])
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(request["socket"])
            with connection.makefile("rw") as stream:
                _serve(stream, request)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _write_to(log: str) -> None:
    """Let all that libraries print go to a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(file, standard)


def _serve(stream: IO[str], request: Mapping[str, Any]) -> None:
    rank = int(os.environ["RANK"])
    send(stream, {"rank": rank, "pid": os.getpid()})
    try:
        if request["returns_memory"]:
            _return_large_blocks()
        form = PEERS[request["peer"]]
        module = importlib.import_module(f"peers.{form.module}")
        dist.init_process_group("gloo")
        baseline = _baseline_bytes()
        trainer = module.start(rank, **form.options)
    except (UserError, ImportError) as refusal:
        send(stream, {"refused": " ".join(str(refusal).split())})
        return
    except Exception:
        send(stream, {"failed": traceback.format_exc()})
        return
    send(stream, {"started": True})
    micro_batches = REFERENCE.micro_batches(rank, ACCUMULATION)
    while receive(stream) is not None:
        try:
            figures = _measured_turn(trainer, micro_batches, request["interface"], baseline)
        except Exception:
            send(stream, {"failed": traceback.format_exc()})
            return
        send(stream, figures)


def _measured_turn(
    trainer: Trainer, micro_batches: Sequence[MicroBatch], interface: str, baseline: int
) -> dict[str, Any]:
    """Two steps in a row, the second of them timed; then all freed memory goes back to the system.

    A step may leave to the next what need not be there before, such as gathering parameters; and the first step of a
    turn must get memory from the system again. From the end of one step to the end of the next each is counted once.
    """
    restart_peak_resident_bytes()
    dist.barrier()
    sent = sent_bytes(interface)
    dist.barrier()
    trainer.step(micro_batches)
    first_loss = trainer.loss()
    start = time.perf_counter()
    trainer.step(micro_batches)
    seconds = time.perf_counter() - start
    peak = peak_anonymous_bytes()
    dist.barrier()
    _wait_until_quiet(interface)
    sent = sent_bytes(interface) - sent
    _tidy_memory()
    return {
        "seconds": seconds,
        "sent": sent // STEPS_PER_TURN,
        "peak": peak - baseline,
        "held": anonymous_bytes() - baseline,
        "losses": [first_loss, trainer.loss()],
    }


def _wait_until_quiet(interface: str) -> None:
    """Until nothing more is sent of what the last step has left to the next."""
    before, now = -1, sent_bytes(interface)
    while now != before:
        time.sleep(QUIET_SECONDS)
        before, now = now, sent_bytes(interface)


def _baseline_bytes() -> int:
    """The memory of this process when everything is imported and has run once, on a model of no size."""
    model = build_model(TINY)
    optimizer = fused_adamw(list(model.parameters()))
    mean_loss(model, TINY.micro_batches(0, 1)[0]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
    optimizer.step()
    dist.all_reduce(torch.zeros(1))
    del model, optimizer
    _tidy_memory()
    return anonymous_bytes()


def _tidy_memory() -> None:
    gc.collect()
    LIBC.malloc_trim(0)


def _return_large_blocks() -> None:
    """From now on the memory of a tensor of some size goes back to the system when the tensor goes.

    glibc does so for blocks that it maps apart; by default it soon keeps freed blocks for later ones, so that a peak
    would be of what it keeps.
    """
    LIBC.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
    LIBC.mallopt(M_TRIM_THRESHOLD, LARGE_BLOCK)
    os.environ["MALLOC_TRIM_THRESHOLD_"] = str(LARGE_BLOCK)  # tells those who would set it otherwise


if __name__ == "__main__":
    main()
