"""From what the user names to a Hugging Face configuration, and from that to a model on the meta device."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from syncline.errors import UserError

_EVERYWHERE = {"model_type", "torch_dtype", "num_labels", "_name_or_path", "attn_implementation"}
_BESIDE_ROPE_PARAMETERS = {"rope_theta", "rope_scaling", "partial_rotary_factor"}
"""Older spellings that transformers folds into `rope_parameters`."""


def resolve_config(model_name_or_path: str | None, model_config: Mapping[str, Any] | None) -> PreTrainedConfig:
    """The configuration of a folder, a hub name or a mapping with `model_type`.

    Raises `UserError` unless exactly one of the two is given, and for anything that transformers does not know or
    cannot read.
    """
    if model_config is not None and model_name_or_path is not None:
        raise UserError(
            f"model_name_or_path {model_name_or_path!r} and model_config",
            "each of them names the model",
            "Write model_name_or_path to start from its weights, or model_config to start from random weights",
        )
    if model_config is not None:
        return _config_from_mapping(model_config)
    if model_name_or_path is not None:
        return _config_from_name(model_name_or_path)
    raise UserError(
        "no model",
        "neither model_name_or_path nor model_config is set",
        "Write model_name_or_path: FOLDER, or model_config: {model_type: llama, hidden_size: 256}",
    )


def build_meta_model(config: PreTrainedConfig, attn_implementation: str | None = None) -> PreTrainedModel:
    """The causal language model of `config` on the meta device, so without any memory, its parameters in float32.

    What serves inference alone (key/value cache, collected hidden states) is off in the model's own copy of `config`.

    Raises `UserError` when it is not a causal language model, or cannot be built as configured.
    """
    config = deepcopy(config)
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        part.use_cache = False
    config.return_dict = True
    config.output_hidden_states = False
    _refuse_router_loss(config)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attn_implementation
            )
    except Exception as error:
        # A configuration out of the ordinary makes models fail in many ways, all of them before anything has started.
        if type(config) not in AutoModelForCausalLM._model_mapping:
            raise UserError(
                f"model_type {config.model_type!r}",
                "transformers has no causal language model of this type",
                "Use a type that has one, such as llama",
            ) from error
        raise UserError(
            f"a model of type {config.model_type!r}",
            f"transformers cannot build it as configured: {_first_line(error)}",
            "Correct the configuration",
        ) from error


def portable_attention(attn_implementation: str | None) -> str | None:
    """The same where it computes on every device and in every dtype, else `eager`: for trials on the CPU in float64."""
    return attn_implementation if attn_implementation in (None, "eager", "sdpa") else "eager"


def _config_from_mapping(mapping: Mapping[str, Any]) -> PreTrainedConfig:
    values = dict(mapping)
    model_type = values.pop("model_type", None)
    if model_type is None:
        raise UserError("model_config", "it has no model_type", "Add one, for example model_type: llama")
    if model_type not in CONFIG_MAPPING:
        raise UserError(
            f"model_config with model_type {model_type!r}",
            "transformers does not know this model type",
            f"Did you mean {' or '.join(_nearest(model_type, _causal_types()))}?",
        )
    config_class = CONFIG_MAPPING[model_type]
    known = _known_keys(config_class)
    for key in values:
        if known and key not in known:
            raise UserError(
                f"model_config with key {key!r}",
                f"{config_class.__name__} has no such key",
                f"Did you mean {' or '.join(_nearest(key, known))}?",
            )
    try:
        return AutoConfig.for_model(model_type, **values)
    except (StrictDataclassError, ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        raise UserError(
            f"model_config of type {model_type!r}",
            f"{config_class.__name__} does not accept it: {' '.join(str(error).split()).rstrip('.')}",
            "Correct the value",
        ) from error


def _config_from_name(name: str) -> PreTrainedConfig:
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(
            f"model_name_or_path {name!r}",
            "the folder has no config.json",
            "Name a folder that save_pretrained has written",
        )
    if folder.is_file():
        raise UserError(
            f"model_name_or_path {name!r}", "it is a file", "Name the folder that holds config.json and the weights"
        )
    try:
        return AutoConfig.from_pretrained(name)
    except Exception as error:
        where = "its config.json cannot be used" if folder.is_dir() else "no such folder, nor can the hub provide it"
        raise UserError(
            f"model_name_or_path {name!r}",
            f"{where}: {_first_line(error)}",
            "Check the name, or write model_config with a model_type to start from random weights",
        ) from error


def _refuse_router_loss(config: PreTrainedConfig) -> None:
    if getattr(config, "output_router_logits", False):
        raise UserError(
            f"output_router_logits: true for model type {config.model_type!r}",
            "the experts' load-balancing loss is no sum over tokens and is not part of the training loss",
            "Write output_router_logits: false",
        )


def _known_keys(config_class: type[PreTrainedConfig]) -> set[str]:
    """Empty when the class does not declare its keys."""
    if not dataclasses.is_dataclass(config_class):
        return set()
    names = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    return names | _EVERYWHERE | (_BESIDE_ROPE_PARAMETERS if "rope_parameters" in names else set())


def _causal_types() -> list[str]:
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _nearest(word: str, known: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(str(word), list(known), n=2, cutoff=0.0)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
