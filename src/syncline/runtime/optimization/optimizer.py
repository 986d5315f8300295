"""The optimizers of one bucket: they update what this rank owns of it.

Optimizers that treat every element alike see the owned part as flat runs, one for each set of settings, in one fused
call; those that look at a parameter as a whole see whole parameters, and so need them to be owned whole. Parameters in
16 bits have a master copy in float32, which is what is updated. The gradient's scale, the clipping factor and the
verdict on overflows go into the fused kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from syncline.program.layout import Bucket

ELEMENTWISE = frozenset({"adamw", "sgd"})
"""Optimizers that update each element by itself, and so work on any slice."""

SMALLEST_RELATIVE_TO = 1e-3
"""Adafactor's second epsilon: steps are relative to a parameter's root mean square, but to no less than this."""


@dataclass(frozen=True)
class OptimizerSettings:
    """How some parameters are updated; nothing of it changes during a run but the learning rate."""

    kind: str = "adamw"
    """`adamw` (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019), `sgd` without momentum,
    `adafactor` (Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018) or `muon`
    (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; matrices only).
    """
    weight_decay: float = 0.0
    learning_rate: float = 1.0
    """By how much the run's learning rate is multiplied."""
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    """Of adamw, added to the root of the second moment; of adafactor, the least root of the second moment."""
    momentum: float = 0.95
    """Of muon."""


@dataclass(frozen=True)
class Piece:
    """A part of what is owned that an optimizer sees as one tensor."""

    settings: int
    start: int
    stop: int
    shape: tuple[int, ...]


class BucketOptimizer:
    """Updates the owned part of one bucket's parameters from the gradient of that part."""

    def __init__(
        self,
        bucket: Bucket,
        owned: Tensor,
        all_settings: Sequence[OptimizerSettings],
        owned_range: tuple[int, int] | None = None,
    ) -> None:
        """`owned` is the owned part of the flat parameters: the elements of `owned_range` (by default all)."""
        self._owned = owned
        self.master = owned.float() if owned.dtype in (torch.bfloat16, torch.float16) else owned
        """What is updated, shape (owned elements,), float32 or float64."""
        self._pieces = list(pieces(bucket, all_settings, owned_range or (0, bucket.numel)))
        self._parameters = [
            nn.Parameter(self.master[piece.start : piece.stop].view(piece.shape)) for piece in self._pieces
        ]
        self._settings = all_settings
        self.optimizers = [_make(kind, self._groups(kind)) for kind in self._kinds()]

    @torch.no_grad()
    def step(
        self, gradient: Tensor, learning_rate: float, factor: Tensor | None, overflow: Tensor | None = None
    ) -> None:
        """Update with `gradient` (owned elements,) times `factor`, a scalar on the device; None is 1.

        `overflow`, a float32 scalar on the device, is 1 where nothing at all must change, else 0.
        """
        flat = gradient if gradient.dtype == self.master.dtype else gradient.to(self.master.dtype)
        # The fused kernels divide by a float32 scale while they read the gradient; in float64 that would cost half the
        # digits.
        in_kernel = factor is not None and flat.dtype == torch.float32 and all(map(_is_fused, self.optimizers))
        if factor is not None and not in_kernel:
            flat.mul_(factor)
        for piece, parameter in zip(self._pieces, self._parameters, strict=True):
            parameter.grad = flat[piece.start : piece.stop].view(piece.shape)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * group["learning_rate_factor"]
            if _is_fused(optimizer):
                self._step_fused(optimizer, factor if in_kernel else None, overflow)
            elif overflow is None or not overflow.item():
                optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
        if self.master is not self._owned:
            self._owned.copy_(self.master)

    def state(self) -> Iterator[tuple[Piece, dict[str, Tensor]]]:
        """The optimizer state of every piece that has any."""
        for optimizer in self.optimizers:
            for piece, parameter in zip(self._pieces, self._parameters, strict=True):
                if parameter in optimizer.state:
                    yield piece, optimizer.state[parameter]

    @staticmethod
    def _step_fused(optimizer: torch.optim.Optimizer, factor: Tensor | None, overflow: Tensor | None) -> None:
        device = optimizer.param_groups[0]["params"][0].device
        optimizer.grad_scale = None if factor is None else factor.float().reciprocal()  # type: ignore[attr-defined]
        needs_verdict = factor is not None and overflow is None
        optimizer.found_inf = torch.zeros((), device=device) if needs_verdict else overflow  # type: ignore[attr-defined]
        optimizer.step()

    def _kinds(self) -> list[str]:
        return list(dict.fromkeys(self._settings[piece.settings].kind for piece in self._pieces))

    def _groups(self, kind: str) -> list[dict[str, object]]:
        """One parameter group of torch's for each settings of this kind."""
        groups: list[dict[str, object]] = []
        for index, settings in enumerate(self._settings):
            members = [p for piece, p in zip(self._pieces, self._parameters, strict=True) if piece.settings == index]
            if members and settings.kind == kind:
                groups.append({"params": members, "learning_rate_factor": settings.learning_rate, **_options(settings)})
        return groups


def pieces(bucket: Bucket, all_settings: Sequence[OptimizerSettings], owned: tuple[int, int]) -> Iterator[Piece]:
    """The owned part of a bucket as its optimizers see it; offsets are relative to the owned part."""
    start, stop = owned
    for segment in bucket.segments:
        if all_settings[segment.settings].kind in ELEMENTWISE:
            low, high = max(segment.start, start), min(segment.stop, stop)
            if low < high:
                yield Piece(segment.settings, low - start, high - start, (high - low,))
            continue
        for slot in bucket.slots:
            if segment.start <= slot.offset < segment.stop and start < stop:
                assert start <= slot.offset, f"{slot.name} is not owned whole"
                assert slot.offset + slot.numel <= stop, f"{slot.name} is not owned whole"
                yield Piece(slot.settings, slot.offset - start, slot.offset - start + slot.numel, slot.shape)


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer.defaults.get("fused"))


def _options(settings: OptimizerSettings) -> dict[str, object]:
    """A settings in the words of its torch optimizer; the learning rate is set before every step."""
    own: dict[str, dict[str, object]] = {
        "adamw": {"betas": (settings.beta1, settings.beta2), "eps": settings.epsilon},
        "adafactor": {"eps": (settings.epsilon, SMALLEST_RELATIVE_TO)},
        "muon": {"momentum": settings.momentum},
    }
    return {"lr": 0.0, "weight_decay": settings.weight_decay, **own.get(settings.kind, {})}


def _make(kind: str, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(groups, fused=True)
    if kind == "sgd":
        return torch.optim.SGD(groups, fused=True)
    if kind == "adafactor":
        return torch.optim.Adafactor(groups)
    return torch.optim.Muon(groups, adjust_lr_fn="match_rms_adamw")
