"""One process on the whole global batch: the plainest training loop there is.

It shares no scheduling, reduction, bucket, clipping or optimizer code with what it checks: whole Hugging Face model,
one forward of all samples (or one per micro-batch where each counts alike), PyTorch's own cross-entropy, clipping and
per-parameter optimizer. Every row is one document, whose positions the model counts itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from syncline.verification.batches import GlobalBatch


@dataclass(frozen=True)
class ReferenceGroup:
    """Parameters that are updated in their own way."""

    pattern: str
    """A regular expression, searched in global names."""
    learning_rate_factor: float
    weight_decay: float | None
    """None: as all others."""


_REST = ReferenceGroup("", 1.0, None)


@dataclass(frozen=True)
class ReferenceSettings:
    """How the reference trains."""

    optimizer: str
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    epsilon: float
    momentum: float
    """Of muon."""
    max_gradient_norm: float
    mean_of_micro_batches: bool
    groups: tuple[ReferenceGroup, ...] = ()

    def group_of(self, names: Sequence[str]) -> ReferenceGroup:
        """The first group that one of a parameter's names belongs to."""
        return next((group for group in self.groups if any(re.search(group.pattern, name) for name in names)), _REST)


@dataclass(frozen=True)
class ReferenceRun:
    parameters: dict[str, Tensor]
    """By global name, after the last step; tied ones under each of their names."""
    losses: list[float]
    gradient_norms: list[float]


def run_reference(model: PreTrainedModel, steps: Sequence[GlobalBatch], settings: ReferenceSettings) -> ReferenceRun:
    """Train `model`, in place, one optimizer step per global batch."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizers = _optimizers(model, settings)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    losses, norms = [], []
    for batch in steps:
        # A parameter that no sample reaches has the gradient 0, and its moments decay; it is not left out of the
        # update.
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
        loss = _mean_of_micro_batches(model, batch) if settings.mean_of_micro_batches else _token_mean(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trained, settings.max_gradient_norm or float("inf"), foreach=False)
        for optimizer in optimizers:
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


def _optimizers(model: PreTrainedModel, settings: ReferenceSettings) -> list[torch.optim.Optimizer]:
    """One for every trained parameter."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    hidden = _hidden_matrices(model)
    return [
        _optimizer(parameter, parameter in hidden, settings.group_of(own_names), settings)
        for parameter, own_names in names.items()
        if parameter.requires_grad
    ]


def _optimizer(
    parameter: nn.Parameter, is_hidden_matrix: bool, group: ReferenceGroup, settings: ReferenceSettings
) -> torch.optim.Optimizer:
    rate = settings.learning_rate * group.learning_rate_factor
    decay = settings.weight_decay if parameter.dim() > 1 else 0.0
    decay = group.weight_decay if group.weight_decay is not None else decay
    if settings.optimizer == "sgd":
        return torch.optim.SGD([parameter], lr=rate, weight_decay=decay, foreach=False)
    if settings.optimizer == "adafactor":
        return torch.optim.Adafactor([parameter], lr=rate, eps=(settings.epsilon, 1e-3), weight_decay=decay)
    if settings.optimizer == "muon" and is_hidden_matrix:
        return torch.optim.Muon(
            [parameter],
            lr=rate,
            weight_decay=decay,
            momentum=settings.momentum,
            nesterov=True,
            adjust_lr_fn="match_rms_adamw",
        )
    return torch.optim.AdamW(
        [parameter],
        lr=rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=decay,
        foreach=False,
        fused=False,
    )


def _hidden_matrices(model: PreTrainedModel) -> set[nn.Parameter]:
    """What muon is for: matrices of the numbered layers that multiply hidden states."""
    names_of_tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    head = model.get_output_embeddings()
    return {
        parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2
        and re.search(r"\.\d+\.", name)
        and name not in names_of_tables
        and (head is None or parameter is not head.weight)
    }
