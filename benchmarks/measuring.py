"""What is measured on the ranks: step times of trainers that take turns, and the memory of one trainer alone."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from kernel import peak_resident_bytes, restart_peak_resident_bytes, sent_bytes
from syncline.data.batch import MicroBatch
from trainers import WatchedTrainer

LOOPBACK = "lo"
WARM_UP_STEPS = 2
MEASURED_STEPS = 2
NORM_TOLERANCE = 1e-3
"""By how much, relatively, the gradient norms of trainers in their first step may differ: PyTorch's own norm of some
million float32 elements is off by a part in ten thousand."""


@dataclass(frozen=True)
class MemoryFigures:
    """The memory and traffic of one trainer, the largest of all ranks, in bytes."""

    peak_resident: int
    """Of the whole process, its start included."""
    peak_resident_in_steps: int
    """Once it is warm."""
    peak_gradients: int
    held_gradients: int
    """Between steps."""
    sent: int
    """Per rank and step, as the trainer counts it."""
    on_the_wire: int
    """Per rank and step, as the kernel counts it: with headers, and with whatever else used the loopback."""


def time_in_turns(
    trainers: Mapping[str, WatchedTrainer], micro_batches: Sequence[MicroBatch], repetitions: int
) -> dict[str, list[float]]:
    """Seconds of every repetition's step of each trainer, on the slowest rank. All ranks call it together.

    A repetition is one step of every trainer, in an order drawn anew, so that what disturbs the machine disturbs all.

    Raises:
        RuntimeError: when the trainers do not compute the same gradient.
    """
    for trainer in trainers.values():
        trainer.step(micro_batches)
    _refuse_disagreement({name: trainer.gradient_norm() for name, trainer in trainers.items()})
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    order = random.Random(0)
    for repetition in range(WARM_UP_STEPS - 1 + repetitions):
        for name in order.sample(list(trainers), len(trainers)):
            elapsed = _time_step(trainers[name], micro_batches)
            if repetition >= WARM_UP_STEPS - 1:
                seconds[name].append(elapsed)
    return seconds


def measure_memory(trainer: WatchedTrainer, micro_batches: Sequence[MicroBatch]) -> MemoryFigures:
    """Run a few steps of the only trainer in these processes. All ranks call it together."""
    for _ in range(WARM_UP_STEPS):
        trainer.step(micro_batches)
    peak = peak_resident_bytes()
    restart_peak_resident_bytes()
    dist.barrier()
    before = sent_bytes(LOOPBACK)
    for _ in range(MEASURED_STEPS):
        figures = trainer.watched_step(micro_batches)
    dist.barrier()
    wire = (sent_bytes(LOOPBACK) - before) // (MEASURED_STEPS * dist.get_world_size())
    peak_in_steps = peak_resident_bytes()
    own = MemoryFigures(
        peak_resident=max(peak, peak_in_steps),
        peak_resident_in_steps=peak_in_steps,
        peak_gradients=figures.peak_gradient_bytes,
        held_gradients=figures.held_gradient_bytes,
        sent=figures.bytes_sent,
        on_the_wire=wire,
    )
    largest = _largest(list(asdict(own).values()))
    return MemoryFigures(*(int(value) for value in largest))


def _time_step(trainer: WatchedTrainer, micro_batches: Sequence[MicroBatch]) -> float:
    dist.barrier()
    start = time.perf_counter()
    trainer.step(micro_batches)
    return _largest([time.perf_counter() - start])[0]


def _largest(values: Sequence[float]) -> list[float]:
    """The largest of all ranks, value by value."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [float(value) for value in tensor]


def _refuse_disagreement(norms: Mapping[str, float]) -> None:
    if max(norms.values()) - min(norms.values()) > NORM_TOLERANCE * max(norms.values()):
        raise RuntimeError(f"the trainers do not compute the same gradient: its norms are {norms}")
