"""The two trainers that are compared, on the same unmodified Hugging Face model, weights, samples and optimizer.

`SynclineTrainer` runs Syncline's own engine. `DdpTrainer` is the loop that a user of `DistributedDataParallel` writes,
with the model's inference caches off. Both update with fused AdamW and clip the global norm to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from syncline.arguments import arguments_from_mapping
from syncline.data.batch import MicroBatch
from syncline.modeling.load import build_meta_model, resolve_config
from syncline.modeling.materialise import materialise
from syncline.program.analysis.costs import wire_bytes
from syncline.training.engine import start_engine
from syncline.training.job import describe_job

CPU = torch.device("cpu")
LEARNING_RATE = 1e-4
MAX_GRADIENT_NORM = 1.0
SEED = 42


@dataclass(frozen=True)
class Workload:
    """What is trained: a model's shape, and the size of a micro-batch and of a bucket."""

    model_config: Mapping[str, Any]
    rows: int
    """Samples in a micro-batch."""
    sequence: int
    bucket_mebibytes: float
    """The largest bucket, for Syncline and for DDP."""

    def micro_batches(self, rank: int, count: int) -> list[MicroBatch]:
        """One step's random samples of one rank, the same in every step."""
        generator = torch.Generator().manual_seed(SEED + rank)
        shape = (self.rows, self.sequence + 1)
        positions = torch.arange(self.sequence).expand(self.rows, self.sequence).contiguous()
        batches = []
        for _ in range(count):
            tokens = torch.randint(0, int(self.model_config["vocab_size"]), shape, generator=generator)
            batch = MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions)
            batches.append(batch.to(CPU))
        return batches


@dataclass(frozen=True)
class SynclineMode:
    """Syncline with these options."""

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class DdpMode:
    """DistributedDataParallel with `no_sync` in all but the last micro-batch, or without it."""

    name: str
    no_sync: bool
    bucket_view: bool
    """`gradient_as_bucket_view`."""


Mode = SynclineMode | DdpMode


@dataclass(frozen=True)
class StepFigures:
    """What one step on one rank says of itself, in bytes."""

    bytes_sent: int
    """Gradients and scalars, by the bandwidth-optimal algorithm."""
    peak_gradient_bytes: int
    held_gradient_bytes: int
    """Gradient storage between this step and the next."""


def describe(workload: Workload) -> str:
    """The shape in words."""
    shape = workload.model_config
    return (
        f"hidden {shape['hidden_size']}, {shape['num_hidden_layers']} layers, {shape['num_attention_heads']} heads, "
        f"intermediate {shape['intermediate_size']}, vocabulary {shape['vocab_size']}, untied, sequence "
        f"{workload.sequence}, micro-batch {workload.rows}"
    )


class Trainer(Protocol):
    """One rank of a trainer."""

    def step(self, micro_batches: Sequence[MicroBatch]) -> None:
        """One optimizer step. All ranks call it together."""

    def loss(self) -> float:
        """Of the last step, before its update: the mean over this rank's tokens, or over all ranks'."""


class WatchedTrainer(Trainer, Protocol):
    """A trainer that says more of its steps."""

    def watched_step(self, micro_batches: Sequence[MicroBatch]) -> StepFigures:
        """The same, counting, which may take time."""

    def gradient_norm(self) -> float:
        """Of the last step, before clipping."""


def start_trainer(mode: Mode, workload: Workload, accumulation: int, rank: int, ranks: int) -> WatchedTrainer:
    """Build one rank of a trainer; all ranks of the default process group call it together."""
    if isinstance(mode, DdpMode):
        return DdpTrainer(mode, workload, ranks)
    return SynclineTrainer(mode, workload, accumulation, rank, ranks)


def build_model(workload: Workload) -> PreTrainedModel:
    """The model to train, with the weights that Syncline gives it."""
    model = build_meta_model(resolve_config(None, workload.model_config))
    materialise(model, dtype=torch.float32, device=CPU, seed=SEED)
    return model.train()


def mean_loss(model: nn.Module, micro_batch: MicroBatch) -> Tensor:
    """Over the tokens of a micro-batch."""
    logits = model(input_ids=micro_batch.input_ids).logits
    return functional.cross_entropy(logits.flatten(0, 1), micro_batch.labels.flatten())


MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def fused_adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)


class SynclineTrainer:
    def __init__(self, mode: SynclineMode, workload: Workload, accumulation: int, rank: int, ranks: int) -> None:
        keys = {
            "model_config": workload.model_config,
            "nproc_per_node": ranks,
            "per_device_train_batch_size": workload.rows,
            "max_seq_length": workload.sequence,
            "gradient_accumulation_steps": accumulation,
            "gradient_bucket_size_MB": workload.bucket_mebibytes,
            "max_grad_norm": MAX_GRADIENT_NORM,
            "seed": SEED,
            **mode.options,
        }
        self._worker = start_engine(describe_job(arguments_from_mapping(keys)), rank, CPU).worker
        self.actions = self._worker.program.ranks[rank]

    def step(self, micro_batches: Sequence[MicroBatch]) -> None:
        self.result = self._worker.step(micro_batches, LEARNING_RATE)

    def watched_step(self, micro_batches: Sequence[MicroBatch]) -> StepFigures:
        self.step(micro_batches)
        result = self.result
        return StepFigures(result.bytes_sent, result.peak_gradient_bytes, result.held_gradient_bytes)

    def loss(self) -> float:
        return float(self.result.loss)

    def gradient_norm(self) -> float:
        assert self.result.gradient_norm is not None
        return float(self.result.gradient_norm)


class DdpTrainer:
    def __init__(
        self, mode: DdpMode, workload: Workload, ranks: int, make_optimizer: MakeOptimizer = fused_adamw
    ) -> None:
        model = build_model(workload)
        self._mode = mode
        self._ranks = ranks
        self._model = DistributedDataParallel(
            model, gradient_as_bucket_view=mode.bucket_view, bucket_cap_mb=workload.bucket_mebibytes
        )
        self._parameters = list(model.parameters())
        self._optimizer = make_optimizer(self._parameters)

    def step(self, micro_batches: Sequence[MicroBatch]) -> None:
        self._loss = 0.0
        for index, micro_batch in enumerate(micro_batches):
            with nullcontext() if self._is_synchronised(index, micro_batches) else self._model.no_sync():
                self._backward(micro_batch, len(micro_batches))
        self._update()

    def watched_step(self, micro_batches: Sequence[MicroBatch]) -> StepFigures:
        self._loss = 0.0
        memory = DdpGradientMemory(self._parameters, self._mode.bucket_view)
        reductions = 0
        for index, micro_batch in enumerate(micro_batches):
            synchronised = self._is_synchronised(index, micro_batches)
            with nullcontext() if synchronised else self._model.no_sync():
                self._backward(micro_batch, len(micro_batches))
            memory.sample(synchronised)
            reductions += synchronised
        self._update()
        sent = reductions * wire_bytes("all_reduce", self._ranks, sum(map(_bytes, self._parameters)))
        return StepFigures(sent, memory.peak, memory.now())

    def loss(self) -> float:
        return self._loss

    def gradient_norm(self) -> float:
        return float(self._norm)

    def _is_synchronised(self, index: int, micro_batches: Sequence[MicroBatch]) -> bool:
        return not self._mode.no_sync or index == len(micro_batches) - 1

    def _backward(self, micro_batch: MicroBatch, accumulation: int) -> None:
        loss = mean_loss(self._model, micro_batch) / accumulation
        loss.backward()
        self._loss += float(loss.detach())

    def _update(self) -> None:
        self._norm = nn.utils.clip_grad_norm_(self._parameters, MAX_GRADIENT_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()


class DdpGradientMemory:
    """Bytes of gradient storage: the reducer's buckets, which it never frees, and the gradients that lie outside them.

    Samples are taken after each backward. Under `gradient_as_bucket_view` a synchronised backward leaves every gradient
    inside the buckets, while one under `no_sync` that finds no gradient makes a new one outside.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], bucket_view: bool) -> None:
        self._parameters = parameters
        self._bucket_view = bucket_view
        self._in_buckets: set[int] = set()
        self.peak = self.now()

    def sample(self, synchronised: bool) -> None:
        """Look at the gradients after a backward."""
        if synchronised and self._bucket_view:
            self._in_buckets = {gradient.untyped_storage().data_ptr() for gradient in self._gradients()}
        self.peak = max(self.peak, self.now())

    def now(self) -> int:
        buckets = sum(map(_bytes, self._parameters))
        outside = [g for g in self._gradients() if g.untyped_storage().data_ptr() not in self._in_buckets]
        return buckets + sum(map(_bytes, outside))

    def _gradients(self) -> Iterator[Tensor]:
        return (parameter.grad for parameter in self._parameters if parameter.grad is not None)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
