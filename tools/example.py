"""The programs that the documents show: of models whose layers are one matrix each."""

from __future__ import annotations

from syncline.program.build import build_program
from syncline.program.layout import ParameterSpec, lay_out
from syncline.program.program import Program
from syncline.strategy import Strategy
from syncline.strategy.topology import Topology


def example_program(strategy: Strategy) -> Program:
    """The step of `strategy` for two layers of one matrix each, in two buckets; replicas and micro-batches are 2."""
    return program_of_layers(strategy, 2)


def program_of_layers(strategy: Strategy, layers: int) -> Program:
    """The step of `strategy` for so many layers of one matrix each, in a bucket each, divided evenly among stages."""
    stages = strategy.placement.stages
    specs = [
        ParameterSpec(f"layers.{i}.weight", (64, 64), i * stages // layers, first_use=i, last_use=i)
        for i in range(layers)
    ]
    layout = lay_out(
        specs,
        bucket_bytes=64 * 64 * 4,
        gradient_itemsize=4,
        ownership=strategy.ownership,
        shards=strategy.shards,
        divide_parameters=strategy.divides_parameters,
    )
    return build_program(strategy, layout, activation_bytes=0)


def example_strategy(**decisions: object) -> Strategy:
    """Two replicas, two micro-batches, and what `decisions` say otherwise."""
    return Strategy(**{"topology": Topology(dp=2), "micro_batches": 2, **decisions})  # type: ignore[arg-type]
