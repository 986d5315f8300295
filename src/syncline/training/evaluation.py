"""The loss on data that is not trained on: every sample once, whatever the number of ranks."""

from __future__ import annotations

import time

import torch

from syncline.data.loader import evaluation_loader
from syncline.data.packing import SampleDataset
from syncline.strategy.topology import Topology
from syncline.training.callbacks import Evaluation
from syncline.training.engine import EVALUATION_MICRO_BATCHES, Engine


def evaluate(
    engine: Engine, dataset: SampleDataset, topology: Topology, rank: int, micro_batch_size: int, device: torch.device
) -> Evaluation:
    """Mean token loss over all valid tokens of `dataset`; the same on every rank, which all call it together."""
    began = time.perf_counter()
    loader = evaluation_loader(
        dataset, micro_batch_size, EVALUATION_MICRO_BATCHES, topology.replica(rank), topology.replicas, device
    )
    loss = torch.zeros((), dtype=torch.float64, device=device)
    tokens = 0
    with engine.evaluating():
        for micro_batches in loader.epoch():
            result = engine.worker.evaluate(engine.evaluation_program, micro_batches)
            loss += result.loss
            tokens += result.tokens
    mean = loss.item() / tokens if tokens else float("nan")
    return Evaluation(mean, tokens, time.perf_counter() - began)
