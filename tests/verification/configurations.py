"""The options that must not change a gradient, value by value, as the keys that a user would write."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from tools.combinations import SIDE_AXES

from tests.verification.covering import pairwise

Keys = dict[str, Any]

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}

TOPOLOGIES: Mapping[str, Keys] = {
    "dp=1": {"nproc_per_node": 1},
    "dp=2": {"nproc_per_node": 2},
    "dp=3": {"nproc_per_node": 3},
    "dp=4": {"nproc_per_node": 4},
    "pp=2": {"nproc_per_node": 2, "pipeline_parallel_degree": 2},
    "pp=3": {"nproc_per_node": 3, "pipeline_parallel_degree": 3},
    "pp=4": {"nproc_per_node": 4, "pipeline_parallel_degree": 4},
    "pp=2 dp=2": {"nproc_per_node": 4, "pipeline_parallel_degree": 2},
}

REDUCTIONS: Mapping[str, Keys] = {
    "every micro-batch, overlapped": {"gradient_sync": "every_micro_batch"},
    "every micro-batch": {"gradient_sync": "every_micro_batch", "overlap_gradient_reduction": False},
    "last micro-batch, overlapped": {"gradient_sync": "last_micro_batch"},
    "last micro-batch": {"gradient_sync": "last_micro_batch", "overlap_gradient_reduction": False},
    "after accumulation": {"data_parallel_config": "gradient_sync_after_accumulate"},
}

AVERAGE, DELAY = "enable_allreduce_avg_in_gradient_scale", "enable_delay_scale_loss"

GRADIENT_LIFE: Mapping[str, Mapping[str, Keys]] = {
    "reduction": REDUCTIONS,
    "average": {"sum": {}, "average": {"data_parallel_config": AVERAGE}},
    "loss scale": {"scaled loss": {}, "delayed scale": {"pipeline_parallel_config": DELAY}},
    "release": {"kept": {}, "released": {"release_grads": True}},
    "normalization": {"tokens": {}, "means": {"gradient_normalization": "micro_batch_mean"}},
}
"""The options of a gradient's life: small enough for their full product."""

OPTIONS: Mapping[str, Mapping[str, Keys]] = {
    "topology": TOPOLOGIES,
    **GRADIENT_LIFE,
    "k": {f"k={k}": {"gradient_accumulation_steps": k} for k in (1, 2, 4, 5)},
    "tying": {"untied": {}, "tied": {"model_config.tie_word_embeddings": True}},
    "optimizer": {
        "adamw": {"optim": "adamw", "weight_decay": 0.1},
        "adamw without decay": {"optim": "adamw", "adam_beta1": 0.5, "adam_beta2": 0.8},
        "sgd": {"optim": "sgd", "weight_decay": 0.1},
    },
    "clipping": {"clipped": {}, "unclipped": {"max_grad_norm": 0.0}},
    "frozen": {
        "all trained": {},
        "norms frozen": {"freeze_parameters": ["norm"]},
        "embedding frozen": {"freeze_parameters": ["embed_tokens"]},
        "first layers frozen": {"freeze_parameters": ["embed_tokens", r"layers\.[01]\."]},
    },
    "schedule": {**SIDE_AXES["schedule"], "three stages a rank": {"virtual_pp_degree": 3}},
    "shapes": {
        "shapes once": {},
        "shapes each step": {"pipeline_parallel_config": "enable_clear_every_step_cache"},
        "shapes always": {"pipeline_parallel_config": "disable_p2p_cache_shape"},
        "received ahead": {"pipeline_parallel_config": "enable_overlap_p2p_comm"},
        "received ahead, shapes each step": {
            "pipeline_parallel_config": "enable_overlap_p2p_comm enable_clear_every_step_cache"
        },
    },
    "order": {"pp first": {}, "sharding first": {"hybrid_parallel_topo_order": "sharding_first"}},
    "recompute": {
        "stored": {},
        "recomputed": {"recompute": True},
        "attention recomputed": {"recompute": True, "recompute_granularity": "full_attn"},
        "every other layer recomputed": {"recompute": True, "recompute_interval": 2},
        "offloaded": {"offload_activations": True},
        "attention recomputed, offloaded": {
            "recompute": True,
            "recompute_granularity": "full_attn",
            "offload_activations": True,
        },
    },
}


def keys_of(choice: Mapping[str, Any], options: Mapping[str, Mapping[str, Keys]] = OPTIONS) -> Keys:
    """The arguments that the chosen value of each option stands for; flags of one key are joined."""
    keys: Keys = {"model_config": dict(LLAMA)}
    for option, value in choice.items():
        for key, setting in options[option][value].items():
            if key.startswith("model_config."):
                keys["model_config"][key.partition(".")[2]] = setting
            elif key.endswith("_parallel_config"):
                keys[key] = f"{keys.get(key, '')} {setting}".strip()
            else:
                keys[key] = setting
    return keys


def gradient_life_product() -> dict[str, Keys]:
    """Every combination of the options of a gradient's life, on 2 replicas with 2 micro-batches."""
    named = {}
    for values in product(*GRADIENT_LIFE.values()):
        choice = {"topology": "dp=2", "k": "k=2", **dict(zip(GRADIENT_LIFE, values, strict=True))}
        named[", ".join(choice.values())] = keys_of(choice)
    return named


def covering_choices() -> list[dict[str, Any]]:
    return pairwise({option: tuple(values) for option, values in OPTIONS.items()})


def covering_configurations() -> dict[str, Keys]:
    """Every pair of values of any two options, in some configuration."""
    return {", ".join(choice.values()): keys_of(choice) for choice in covering_choices()}
