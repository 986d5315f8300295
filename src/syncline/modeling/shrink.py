"""A configuration of the same kind but tiny, to try a model's structure in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from syncline.errors import UserError

HEADS = 4
HEAD_SIZE = 16
VOCABULARY = 128

_SIZES = {
    "hidden_size": HEADS * HEAD_SIZE,
    "embedding_size": HEADS * HEAD_SIZE,
    "num_attention_heads": HEADS,
    "head_dim": HEAD_SIZE,
    "vocab_size": VOCABULARY,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "qk_rope_head_dim": HEAD_SIZE,
    "qk_nope_head_dim": HEAD_SIZE,
    "v_head_dim": HEAD_SIZE,
}
_LIMITS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": 8,
    "rotary_dim": HEAD_SIZE,
}
_SMALLEST_CONTEXT = 128


def shrink_config(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """`config` with `layers` layers, small sizes, and everything that shapes the computation kept.

    What is kept: the kinds of layers (each of them, if `layers` suffices), tying, activation, normalisation and rotary
    settings, the ratio of attention to key/value heads, one or several experts. Token ids are folded into the
    vocabulary of 128; sliding windows are at most 8 tokens wide, so that short sequences feel them.

    Raises `UserError` for the few configurations whose values depend on each other in ways of their own.
    """
    try:
        return _shrink(config, layers)
    except Exception as error:
        raise UserError(
            f"model_type {config.model_type!r}",
            f"no tiny copy of it can be made to try it on: {type(error).__name__}: {' '.join(str(error).split())}",
            "Use pipeline_parallel_degree 1, which needs no trial",
        ) from error


def _shrink(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    values = config.to_dict()
    names = {name: config.attribute_map.get(name, name) for name in (*_SIZES, *_LIMITS)}
    for name, size in _SIZES.items():
        if values.get(names[name]) is not None:
            values[names[name]] = size
    for name, limit in _LIMITS.items():
        if values.get(names[name]) is not None:
            values[names[name]] = min(values[names[name]], limit)
    _shrink_key_value_heads(config, values)
    _shrink_context(config, values)
    _shrink_layers(config, values, layers)
    _fold_token_ids(values)
    return type(config).from_dict(values)


def _shrink_key_value_heads(config: PreTrainedConfig, values: dict[str, Any]) -> None:
    key_value_heads = values.get("num_key_value_heads")
    if key_value_heads is not None:
        values["num_key_value_heads"] = max(1, HEADS * key_value_heads // config.num_attention_heads)


def _shrink_context(config: PreTrainedConfig, values: dict[str, Any]) -> None:
    name = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    rope = values.get("rope_parameters")
    if values.get(name) is not None and not rope:
        values[name] = _SMALLEST_CONTEXT
    elif values.get(name) is not None:
        values[name] = max(values[name], _SMALLEST_CONTEXT)
    if rope:
        _shorten_factors(rope)


def _shorten_factors(rope: dict[str, Any]) -> None:
    """One factor per rotated pair, in the parameters themselves or in those of each kind of layer."""
    for key, value in rope.items():
        if isinstance(value, Mapping):
            _shorten_factors(rope[key])
        elif key in ("short_factor", "long_factor"):
            rope[key] = value[: int(HEAD_SIZE * rope.get("partial_rotary_factor", 1.0)) // 2]


def _shrink_layers(config: PreTrainedConfig, values: dict[str, Any], layers: int) -> None:
    name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    before = values[name]
    values[name] = layers
    chosen = _choose_layers(values.get("layer_types") or [None] * before, layers)
    for key, value in values.items():
        if isinstance(value, list) and len(value) == before:
            values[key] = [value[index] for index in chosen]


def _choose_layers(kinds: list[Any], layers: int) -> list[int]:
    """The first layers, the last of them replaced by the first of each kind that would be missing."""
    chosen = [index % len(kinds) for index in range(layers)]
    present = {kinds[index] for index in chosen}
    missing = [kinds.index(kind) for kind in dict.fromkeys(kinds) if kind not in present][:layers]
    return chosen[: layers - len(missing)] + missing


def _fold_token_ids(values: dict[str, Any]) -> None:
    for key, value in values.items():
        if not key.endswith("_token_id"):
            continue
        if isinstance(value, int):
            values[key] = value % VOCABULARY
        elif isinstance(value, list):
            values[key] = sorted({token % VOCABULARY for token in value})
