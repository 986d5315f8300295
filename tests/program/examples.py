"""Small layouts and programs for tests."""

from __future__ import annotations

from syncline.program.build import build_program
from syncline.program.layout import ParameterLayout, ParameterSpec, lay_out
from syncline.program.passes.normalization import token_mean
from syncline.program.passes.tied_weights import sum_tied_gradients
from syncline.program.program import Program, Sizes
from syncline.program.schedules import SCHEDULES
from syncline.program.schedules.naive import naive_program
from syncline.strategy import Strategy
from syncline.topology import Topology


def small_layout(*, stages: int = 1, replicas: int = 1, tied: bool = False, layers: int = 0) -> ParameterLayout:
    """An embedding, `layers` layers of a matrix and a norm weight, and a head, in buckets of about one matrix each."""
    specs = [ParameterSpec("embedding", (16, 4), 0, decay=True)]
    for layer in range(layers):
        stage = layer * stages // layers
        specs.append(ParameterSpec(f"layers.{layer}.matrix", (16, 4), stage, decay=True))
        specs.append(ParameterSpec(f"layers.{layer}.norm", (4,), stage, decay=False))
    if not (tied and stages == 1):
        specs.append(ParameterSpec("head", (16, 4), stages - 1, decay=True, tied_to="embedding" if tied else None))
    return lay_out(specs, bucket_bytes=256, gradient_itemsize=4, replicas=replicas)


def small_naive(*, stages: int = 1, replicas: int = 1, micro_batches: int = 2, tied: bool = False) -> Program:
    """The naive step of a model without layers: bucket 0 is the head and bucket 1 the embedding on one stage."""
    topology = Topology(pp=stages, dp=replicas)
    layout = small_layout(stages=stages, replicas=replicas, tied=tied)
    return naive_program(topology, layout, micro_batches, SCHEDULES["1F1B"], Sizes(activation_bytes=64))


def small_scaled(**sizes: int | bool) -> Program:
    """The naive step with the default normalisation."""
    return sum_tied_gradients(token_mean(small_naive(**sizes)))  # type: ignore[arg-type]


def small_program(strategy: Strategy, *, tied: bool = False, layers: int = 3) -> Program:
    topology = strategy.topology
    layout = small_layout(stages=topology.pp, replicas=topology.replicas, tied=tied, layers=max(layers, topology.pp))
    return build_program(strategy, layout, activation_bytes=64)
