"""DeepSpeed's ZeRO stages 1 and 2 on the CPU, over Gloo, with torch's fused AdamW: nothing is compiled.

Stage 2 reduces gradients in every micro-batch: it has no way to defer that.
"""

from __future__ import annotations

from collections.abc import Sequence

import deepspeed

from against_ddp import ACCUMULATION, REFERENCE
from ranks import RANKS
from syncline.data.batch import MicroBatch
from trainers import MAX_GRADIENT_NORM, Trainer, build_model, fused_adamw, mean_loss

# Ranks of one machine would exchange inference's small messages through shared memory, with code compiled on the spot.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def start(rank: int, *, stage: int) -> Trainer:
    return DeepSpeedTrainer(stage)


class DeepSpeedTrainer:
    def __init__(self, stage: int) -> None:
        model = build_model(REFERENCE)
        bucket_elements = int(REFERENCE.bucket_mebibytes * 2**20 / 4)
        self._engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=fused_adamw(list(model.parameters())),
            config={
                "train_micro_batch_size_per_gpu": REFERENCE.rows,
                "gradient_accumulation_steps": ACCUMULATION,
                "train_batch_size": REFERENCE.rows * ACCUMULATION * RANKS,
                "gradient_clipping": MAX_GRADIENT_NORM,
                "zero_optimization": {
                    "stage": stage,
                    "reduce_bucket_size": bucket_elements,
                    "allgather_bucket_size": bucket_elements,
                },
            },
        )

    def step(self, micro_batches: Sequence[MicroBatch]) -> None:
        total = 0.0
        for micro_batch in micro_batches:
            loss = mean_loss(self._engine, micro_batch)
            self._engine.backward(loss)
            self._engine.step()
            total += float(loss.detach())
        self._loss = total / len(micro_batches)

    def loss(self) -> float:
        return self._loss
