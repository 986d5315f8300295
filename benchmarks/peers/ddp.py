"""`torch.nn.parallel.DistributedDataParallel`, with `no_sync` in all but the last micro-batch or without it."""

from __future__ import annotations

from against_ddp import REFERENCE
from ranks import RANKS
from trainers import DdpMode, DdpTrainer, Trainer


def start(rank: int, *, no_sync: bool) -> Trainer:
    return DdpTrainer(DdpMode("DDP", no_sync=no_sync, bucket_view=False), REFERENCE, RANKS)
