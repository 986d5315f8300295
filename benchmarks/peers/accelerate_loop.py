"""Hugging Face Accelerate: the loop of its documentation on gradient accumulation, in plain data parallelism."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate import Accelerator, DistributedDataParallelKwargs

from against_ddp import ACCUMULATION, REFERENCE
from syncline.data.batch import MicroBatch
from trainers import MAX_GRADIENT_NORM, Trainer, build_model, fused_adamw, mean_loss


def start(rank: int) -> Trainer:
    return AccelerateTrainer()


class AccelerateTrainer:
    def __init__(self) -> None:
        buckets = DistributedDataParallelKwargs(bucket_cap_mb=int(REFERENCE.bucket_mebibytes))
        self._accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION, kwargs_handlers=[buckets])
        model = build_model(REFERENCE)
        optimizer = fused_adamw(list(model.parameters()))
        self._model, self._optimizer = self._accelerator.prepare(model, optimizer)

    def step(self, micro_batches: Sequence[MicroBatch]) -> None:
        total = 0.0
        for micro_batch in micro_batches:
            with self._accelerator.accumulate(self._model):
                loss = mean_loss(self._model, micro_batch)
                self._accelerator.backward(loss)
                if self._accelerator.sync_gradients:
                    self._accelerator.clip_grad_norm_(self._model.parameters(), MAX_GRADIENT_NORM)
                self._optimizer.step()
                self._optimizer.zero_grad()
                total += float(loss.detach())
        self._loss = total / len(micro_batches)

    def loss(self) -> float:
        return self._loss
