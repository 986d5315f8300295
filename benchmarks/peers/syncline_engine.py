"""Syncline's own engine, with options."""

from __future__ import annotations

from typing import Any

from against_ddp import ACCUMULATION, REFERENCE
from ranks import RANKS
from trainers import SynclineMode, SynclineTrainer, Trainer


def start(rank: int, **options: Any) -> Trainer:
    return SynclineTrainer(SynclineMode("Syncline", options), REFERENCE, ACCUMULATION, rank, RANKS)
