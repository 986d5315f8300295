"""Syncline's own engine, with options."""

from __future__ import annotations

from typing import Any

from against_ddp import ACCUMULATION, REFERENCE
from ranks import RANKS
from syncline.distributed.host_memory import keep_freed_memory
from trainers import SynclineMode, SynclineTrainer, Trainer


def start(rank: int, **options: Any) -> Trainer:
    keep_freed_memory()  # as every rank of `syncline train` does
    return SynclineTrainer(SynclineMode("Syncline", options), REFERENCE, ACCUMULATION, rank, RANKS)
