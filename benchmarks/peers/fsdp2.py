"""FSDP2: `fully_shard` on every layer and on the model, as its documentation has it.

`deferred` reduces gradients in the last micro-batch only (`set_requires_gradient_sync`). Without `reshard` the gathered
parameters stay from the first forward of a step to its last backward, which is what saves gathers.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from against_ddp import REFERENCE
from ranks import RANKS
from syncline.data.batch import MicroBatch
from trainers import MAX_GRADIENT_NORM, Trainer, build_model, fused_adamw, mean_loss


def start(rank: int, *, deferred: bool, reshard: bool) -> Trainer:
    return Fsdp2Trainer(deferred, reshard)


class Fsdp2Trainer:
    def __init__(self, deferred: bool, reshard: bool) -> None:
        self._deferred, self._reshard = deferred, reshard
        model = build_model(REFERENCE)
        mesh = init_device_mesh("cpu", (RANKS,))
        layers = model.get_submodule("model.layers")
        for layer in layers.children():
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        self._model = model
        self._sharding = fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        self._parameters = list(model.parameters())
        self._optimizer = fused_adamw(self._parameters)

    def step(self, micro_batches: Sequence[MicroBatch]) -> None:
        self._loss = 0.0
        for index, micro_batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            if self._deferred:
                self._sharding.set_requires_gradient_sync(is_last)
            if not self._reshard:
                self._sharding.set_reshard_after_backward(is_last)
            loss = mean_loss(self._model, micro_batch) / len(micro_batches)
            loss.backward()
            self._loss += float(loss.detach())
        nn.utils.clip_grad_norm_(self._parameters, MAX_GRADIENT_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def loss(self) -> float:
        return self._loss
