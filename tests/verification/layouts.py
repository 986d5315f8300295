"""Layouts as a small Llama has them, without a model: what the proof of many programs runs on."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from syncline.program.layout import ParameterLayout, ParameterSpec, lay_out
from syncline.strategy import Ownership, Strategy

VOCABULARY, HIDDEN, INTERMEDIATE = 24, 16, 32
BUCKET_ELEMENTS = 1300
"""Small, so that a layer fills more than one bucket."""

LAYER = {
    "input_layernorm": (HIDDEN,),
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "post_attention_layernorm": (HIDDEN,),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
"""In the order in which a forward uses them."""
FROZEN = "model.layers.0.input_layernorm"


@lru_cache(maxsize=64)
def llama_specs(stages: int, tied: bool) -> tuple[ParameterSpec, ...]:
    """A Llama with one layer more than stages, whose first norm is frozen."""
    # The layer left over goes to the second stage, but never to the last one.
    stage_of = sorted([*range(stages), 1 if stages > 2 else 0])
    last_use = len(stage_of) + 2
    tied_at_home = tied and stages == 1
    found = [_spec("model.embed_tokens", (VOCABULARY, HIDDEN), 0, 0, last_use if tied_at_home else 0)]
    for layer, stage in enumerate(stage_of):
        found += [_spec(f"model.layers.{layer}.{name}", LAYER[name], stage, layer + 1) for name in LAYER]
    found.append(_spec("model.norm", (HIDDEN,), stages - 1, last_use - 1))
    if not tied_at_home:
        tied_to = "model.embed_tokens.weight" if tied else None
        found.append(_spec("lm_head", (VOCABULARY, HIDDEN), stages - 1, last_use, tied_to=tied_to))
    return tuple(replace(spec, order=order) for order, spec in enumerate(found))


def llama_layout(strategy: Strategy, tied: bool) -> ParameterLayout:
    """As `syncline.training.job` lays a model out, in buckets of `BUCKET_ELEMENTS` whatever the dtype."""
    return _layout(strategy.placement.stages, tied, strategy.ownership, strategy.shards, strategy.divides_parameters)


@lru_cache(maxsize=256)
def _layout(stages: int, tied: bool, ownership: Ownership, shards: int, divide_parameters: bool) -> ParameterLayout:
    return lay_out(
        llama_specs(stages, tied),
        bucket_bytes=BUCKET_ELEMENTS,
        gradient_itemsize=1,
        ownership=ownership,
        shards=shards,
        divide_parameters=divide_parameters,
    )


def _spec(
    module: str,
    shape: tuple[int, ...],
    stage: int,
    first_use: int,
    last_use: int | None = None,
    tied_to: str | None = None,
) -> ParameterSpec:
    return ParameterSpec(
        f"{module}.weight",
        shape,
        stage,
        settings=0 if len(shape) >= 2 else 1,
        tied_to=tied_to,
        frozen=module == FROZEN,
        block=".".join(module.split(".")[:3]) if "layers" in module else module,
        first_use=first_use,
        last_use=first_use if last_use is None else last_use,
    )
