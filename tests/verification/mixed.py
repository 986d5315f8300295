"""The gradient that training in float32 or 16 bits must find, by one process and plain autograd, and how near it.

16-bit training is compared with the same 16-bit computation: the whole model on one micro-batch after another, whose
gradients add up in float32. What pipelines, replicas and sharding add to that is the order of float32 sums, and what a
bfloat16 wire rounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from syncline.data.batch import IGNORED_LABEL, MicroBatch
from syncline.modeling.kernels.loss import token_loss_sum
from syncline.strategy import Strategy, SyncMoment

FLOAT32_TOLERANCE = 1e-5
"""For sums in float32, relative to the largest gradient of the reference."""
BFLOAT16_ROUNDING = 2.0**-8
"""For every addend that travels in bfloat16, relative to the largest gradient: half of it for the addend itself, half
for the partial sum.
"""

Gradients = dict[str, Tensor]
"""By global name; a tied parameter under each of its names."""


def tolerance(strategy: Strategy) -> float:
    """How far a reduced gradient may be from the reference's, relative to the reference's largest gradient."""
    replicas = strategy.topology.replicas
    if strategy.reduce_dtype != "bfloat16" or replicas == 1:
        return FLOAT32_TOLERANCE
    reductions = strategy.micro_batches if strategy.sync is SyncMoment.EVERY_MICRO_BATCH else 1
    return FLOAT32_TOLERANCE + BFLOAT16_ROUNDING * replicas * reductions


def whole_batch_gradients(model: PreTrainedModel, micro_batches: Iterable[MicroBatch]) -> Gradients:
    """Of the mean loss over all valid tokens, in one forward and backward in the model's own dtype."""
    parts = list(micro_batches)
    input_ids, labels = (torch.cat([getattr(part, name) for part in parts]) for name in ("input_ids", "labels"))
    model.zero_grad()
    logits = model(input_ids=input_ids).logits
    functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL).backward()
    return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}


def summed_gradients(model: PreTrainedModel, micro_batches: Iterable[MicroBatch], seed: float) -> Gradients:
    """Each micro-batch's gradients of `seed` times the sum of its token losses, added up in float32.

    The two uses of a tied matrix are parameters of their own here, so that theirs are added up in float32, too.
    """
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    tied = head.weight is embedding.weight
    if tied:
        head.weight = nn.Parameter(head.weight.detach().clone())
    total: Gradients = {}
    for micro_batch in micro_batches:
        model.zero_grad()
        loss = token_loss_sum(model(input_ids=micro_batch.input_ids).logits, micro_batch.labels)
        loss.backward(torch.full_like(loss, seed))
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            gradient = parameter.grad.float()
            total[name] = total[name] + gradient if name in total else gradient
    if tied:
        names = {parameter: name for name, parameter in model.named_parameters()}
        first, second = names[embedding.weight], names[head.weight]
        total[first] = total[second] = total[first] + total[second]
    return total
