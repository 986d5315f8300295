"""The trainers that stand side by side, by the names that `--only` takes. Nothing of theirs is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Form:
    """A trainer and how it is set."""

    title: str
    module: str
    """The file of `peers/` with its `start(rank, **options)`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    sharded: bool = False
    """Whether replicas divide optimizer state, gradients or parameters."""

    @property
    def is_own(self) -> bool:
        return self.module == SYNCLINE


SYNCLINE = "syncline_engine"

_SLICES = {"sharding": "stage1", "sharding_parallel_config": "split_param"}
_SHARDING: dict[str, tuple[str, dict[str, Any]]] = {
    "": ("data parallel", {}),
    "-stage1-tensor": ("stage 1, whole tensors", {"sharding": "stage1"}),
    "-stage1-slice": ("stage 1, slices", _SLICES),
    "-stage2": ("stage 2", {"sharding": "stage2"}),
    "-stage3": ("stage 3", {"sharding": "stage3"}),
}


def _syncline(title: str, options: Mapping[str, Any]) -> Form:
    return Form(f"Syncline, {title}", SYNCLINE, options, sharded="sharding" in options)


REFERENCE_PEER = "ddp-no-sync"
"""To which all others are compared."""

PEERS: dict[str, Form] = {
    **{f"syncline{suffix}": _syncline(title, keys) for suffix, (title, keys) in _SHARDING.items()},
    **{
        f"syncline{suffix}-release": _syncline(f"{title}, release", {**keys, "release_grads": True})
        for suffix, (title, keys) in _SHARDING.items()
    },
    "syncline-stage1-slice-bf16": _syncline(
        "stage 1, slices, bfloat16 on the wire", {**_SLICES, "gradient_reduce_dtype": "bfloat16"}
    ),
    "syncline-stage2-every": _syncline(
        "stage 2, every micro-batch", {"sharding": "stage2", "gradient_sync": "every_micro_batch"}
    ),
    "syncline-stage3-every": _syncline(
        "stage 3, every micro-batch", {"sharding": "stage3", "gradient_sync": "every_micro_batch"}
    ),
    "ddp": Form("DDP, every micro-batch", "ddp", {"no_sync": False}),
    REFERENCE_PEER: Form("DDP, `no_sync`", "ddp", {"no_sync": True}),
    "ddp-zero-redundancy": Form("DDP, `no_sync`, `ZeroRedundancyOptimizer`", "zero_redundancy", sharded=True),
    "fsdp2": Form("FSDP2, every micro-batch", "fsdp2", {"deferred": False, "reshard": True}, sharded=True),
    "fsdp2-deferred": Form("FSDP2, deferred", "fsdp2", {"deferred": True, "reshard": True}, sharded=True),
    "fsdp2-deferred-no-reshard": Form(
        "FSDP2, deferred, no reshard", "fsdp2", {"deferred": True, "reshard": False}, sharded=True
    ),
    "deepspeed-zero1": Form("DeepSpeed ZeRO-1", "deepspeed_zero", {"stage": 1}, sharded=True),
    "deepspeed-zero2": Form("DeepSpeed ZeRO-2", "deepspeed_zero", {"stage": 2}, sharded=True),
    "hf-trainer": Form("Hugging Face Trainer", "hugging_face_trainer"),
    "accelerate": Form("Accelerate", "accelerate_loop"),
}
