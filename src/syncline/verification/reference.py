"""One process on the whole global batch: the plainest training loop there is.

It shares no scheduling, reduction, bucket, clipping or optimizer code with what it checks: whole Hugging Face model,
one forward of all samples (or one per micro-batch where each counts alike), PyTorch's own cross-entropy, clipping and
per-parameter optimizer. Every row is one document, whose positions the model counts itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from syncline.verification.batches import GlobalBatch


@dataclass(frozen=True)
class ReferenceSettings:
    """How the reference trains."""

    optimizer: str
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    epsilon: float
    max_gradient_norm: float
    mean_of_micro_batches: bool


@dataclass(frozen=True)
class ReferenceRun:
    parameters: dict[str, Tensor]
    """By global name, after the last step; tied ones under each of their names."""
    losses: list[float]
    gradient_norms: list[float]


def run_reference(model: PreTrainedModel, steps: Sequence[GlobalBatch], settings: ReferenceSettings) -> ReferenceRun:
    """Train `model`, in place, one optimizer step per global batch."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = _optimizer(trained, settings)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    losses, norms = [], []
    for batch in steps:
        # A parameter that no sample reaches has the gradient 0, and its moments decay; it is not left out of the
        # update.
        optimizer.zero_grad(set_to_none=False)
        loss = _mean_of_micro_batches(model, batch) if settings.mean_of_micro_batches else _token_mean(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trained, settings.max_gradient_norm or float("inf"), foreach=False)
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return ReferenceRun(dict(model.named_parameters(remove_duplicate=False)), losses, norms)


def _token_mean(model: PreTrainedModel, batch: GlobalBatch) -> Tensor:
    input_ids = torch.cat([micro_batch.input_ids for micro_batch in batch.values()])
    labels = torch.cat([micro_batch.labels for micro_batch in batch.values()])
    logits = model(input_ids=input_ids).logits
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="mean")


def _mean_of_micro_batches(model: PreTrainedModel, batch: GlobalBatch) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for micro_batch in batch.values():
        logits = model(input_ids=micro_batch.input_ids).logits
        labels = micro_batch.labels.flatten()
        loss = functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
        total = total + loss / max(1, int((labels != -100).sum()))
    return total / len(batch)


def _optimizer(parameters: list[nn.Parameter], settings: ReferenceSettings) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=settings.learning_rate, foreach=False)
    return torch.optim.AdamW(
        groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon, foreach=False, fused=False
    )
