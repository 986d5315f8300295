"""Small layouts and programs for tests."""

from __future__ import annotations

from collections.abc import Collection

from syncline.program.build import build_forward_program, build_program
from syncline.program.layout import ParameterLayout, ParameterSpec, lay_out
from syncline.program.naive import naive_program
from syncline.program.passes.normalization import token_mean
from syncline.program.passes.sharding import shard_updates
from syncline.program.passes.tied_weights import sum_tied_gradients
from syncline.program.program import Program, Sizes
from syncline.schedules import SCHEDULES
from syncline.schedules.placement import Placement
from syncline.strategy import Ownership, Strategy
from syncline.strategy.topology import Topology


def small_layout(
    *,
    stages: int = 1,
    tied: bool = False,
    layers: int = 0,
    ownership: Ownership = Ownership.REPLICATED,
    shards: int = 1,
    divide_parameters: bool = False,
    frozen: Collection[str] = (),
) -> ParameterLayout:
    """An embedding, `layers` layers of a matrix and a norm weight, and a head, in buckets of about one matrix each.

    Tied on one stage, the head is the embedding, used again at the end of the forward.
    """
    names = ["embedding", *(f"layers.{layer}.{part}" for layer in range(layers) for part in ("matrix", "norm")), "head"]
    tied_within = tied and stages == 1
    specs = []
    for name in names:
        block, _, part = name.rpartition(".") if "." in name else (name, "", name)
        use = {"embedding": 0, "head": layers + 1}.get(name, -1)
        stage = {"embedding": 0, "head": stages - 1}.get(name, -1)
        if part in ("matrix", "norm"):
            layer = int(block.removeprefix("layers."))
            use, stage = layer + 1, layer * stages // layers
        if name == "head" and tied_within:
            continue
        specs.append(
            ParameterSpec(
                name,
                (4,) if part == "norm" else (16, 4),
                stage,
                settings=1 if part == "norm" else 0,
                tied_to="embedding" if tied and name == "head" else None,
                frozen=name in frozen,
                block=block,
                first_use=use,
                last_use=layers + 1 if tied_within and name == "embedding" else use,
            )
        )
    return lay_out(
        specs,
        bucket_bytes=256,
        gradient_itemsize=4,
        ownership=ownership,
        shards=shards,
        divide_parameters=divide_parameters,
    )


def small_naive(
    *,
    stages: int = 1,
    replicas: int = 1,
    micro_batches: int = 2,
    tied: bool = False,
    layers: int = 0,
    ownership: Ownership = Ownership.REPLICATED,
    shards: int = 1,
) -> Program:
    """The naive step; without layers bucket 0 is the head and bucket 1 the embedding on one stage."""
    topology = Topology(pp=stages, dp=replicas, sharding=shards)
    layout = small_layout(stages=stages, tied=tied, layers=layers, ownership=ownership, shards=shards)
    return naive_program(
        topology, Placement(stages), layout, micro_batches, SCHEDULES["1F1B"], Sizes(activation_bytes=64)
    )


def small_scaled(**sizes: int | bool) -> Program:
    """The naive step with the default normalisation."""
    return sum_tied_gradients(token_mean(small_naive(**sizes)))  # type: ignore[arg-type]


def small_sharded(ownership: Ownership, *, shards: int = 2, **sizes: int | bool) -> Program:
    """The naive step of ranks that divide the updates."""
    return shard_updates(small_naive(ownership=ownership, shards=shards, **sizes))  # type: ignore[arg-type]


def small_program(strategy: Strategy, *, tied: bool = False, layers: int = 3, frozen: Collection[str] = ()) -> Program:
    return build_program(strategy, _layout_for(strategy, tied, layers, frozen), activation_bytes=64)


def small_forward_program(strategy: Strategy, micro_batches: int, *, tied: bool = False) -> Program:
    return build_forward_program(strategy, _layout_for(strategy, tied), micro_batches, activation_bytes=64)


def _layout_for(strategy: Strategy, tied: bool, layers: int = 3, frozen: Collection[str] = ()) -> ParameterLayout:
    return small_layout(
        stages=strategy.placement.stages,
        tied=tied,
        layers=max(layers, strategy.placement.stages),
        ownership=strategy.ownership,
        shards=strategy.shards,
        divide_parameters=strategy.divides_parameters,
        frozen=frozen,
    )
