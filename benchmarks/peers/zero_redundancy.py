"""DistributedDataParallel with `no_sync`, and torch's ZeroRedundancyOptimizer: each rank updates some whole tensors."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from against_ddp import REFERENCE
from ranks import RANKS
from trainers import LEARNING_RATE, DdpMode, DdpTrainer, Trainer


def start(rank: int) -> Trainer:
    mode = DdpMode("ZeroRedundancyOptimizer", no_sync=True, bucket_view=False)
    return DdpTrainer(mode, REFERENCE, RANKS, _sharded_adamw)


def _sharded_adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
