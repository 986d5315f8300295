"""Weights of a Hugging Face folder, read straight into the parameters that a stage owns."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from syncline.checkpoint.huggingface import INDEX_FILE, WEIGHTS_FILE
from syncline.errors import UserError
from syncline.modeling.pipeline.stage import Stage


@dataclass(frozen=True)
class Source:
    """Where a tensor lies on disk."""

    file: Path
    key: str


_RECOMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers that older checkpoints hold and today's models compute."""


def local_folder(model_name_or_path: str) -> Path:
    """The folder itself, or the local copy of a hub model, fetched where it is missing. Raises `UserError` when it
    cannot be.
    """
    if Path(model_name_or_path).is_dir():
        return Path(model_name_or_path)
    try:
        return Path(
            snapshot_download(model_name_or_path, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"])
        )
    except Exception as error:
        raise UserError(
            f"model_name_or_path {model_name_or_path!r}",
            f"no such folder, nor can the hub provide it: {type(error).__name__}",
            "Check the name and the network, or name a local folder",
        ) from error


def load_weights(folder: Path | str, model: PreTrainedModel | Stage) -> None:
    """Copy what `model` owns out of the folder's safetensors files, converted to each parameter's dtype and device.

    Of everything else only names are read. A tied head that the files leave out takes the embedding's values. Raises
    `UserError`, naming the tensors, when some are missing, unknown to the model or of another shape, or when
    transformers would convert them.
    """
    folder = Path(folder)
    whole = model.model if isinstance(model, Stage) else model
    known = model.model_names if isinstance(model, Stage) else frozenset(whole.state_dict())
    sources = _locate(folder, whole, known)
    _refuse_unexpected(folder, whole, sources.keys() - known)
    wanted: dict[Path, list[tuple[str, Tensor]]] = {}
    missing = []
    for tensor, names in _names_by_tensor(model).items():
        source = next((sources[name] for name in names if name in sources), None)
        if source is not None:
            wanted.setdefault(source.file, []).append((source.key, tensor))
        elif not _matches(names[0], whole._keys_to_ignore_on_load_missing or ()):
            missing.append(names[0])
    if missing:
        raise _refusal(folder, f"its files lack {_some(missing)}")
    for file, tensors in wanted.items():
        _copy(file, tensors)


def _locate(folder: Path, model: PreTrainedModel, known: frozenset[str]) -> dict[str, Source]:
    """Where each tensor of the files lies, by its name in the model: transformers has renamed some since they were
    written.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    meta = dict.fromkeys(known, True)
    sources = {}
    for key, file in _keys_of(folder).items():
        name, converted = rename_source_key(key, renamings, converters, model.base_model_prefix, meta)
        if converted is not None:
            raise UserError(
                f"weights of {folder}",
                f"transformers converts {key} while loading, which cannot be done straight into a stage",
                "Load it with from_pretrained and write it with save_pretrained(..., save_original_format=False)",
            )
        sources[name] = Source(file, key)
    return sources


def _keys_of(folder: Path) -> dict[str, Path]:
    """The file that holds each tensor."""
    if (folder / INDEX_FILE).is_file():
        index = json.loads((folder / INDEX_FILE).read_text())
        return {key: folder / file for key, file in index["weight_map"].items()}
    if (folder / WEIGHTS_FILE).is_file():
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            return dict.fromkeys(file.keys(), folder / WEIGHTS_FILE)
    raise UserError(
        f"weights of {folder}",
        f"the folder has neither {WEIGHTS_FILE} nor {INDEX_FILE}",
        "Load it with from_pretrained and write it again with save_pretrained, which writes safetensors",
    )


def _names_by_tensor(model: PreTrainedModel | Stage) -> dict[Tensor, list[str]]:
    """Every parameter and persistent buffer with the names under which files may hold it, the preferred one first."""
    whole = model.model if isinstance(model, Stage) else model
    names: dict[Tensor, list[str]] = {}
    for name, tensor in whole.state_dict(keep_vars=True).items():
        names.setdefault(tensor, []).append(name)
    if isinstance(model, Stage):
        for name, source in model.tied_sources.items():
            names[whole.get_parameter(name)].insert(0, source.name)
    return names


def _copy(file: Path, tensors: Sequence[tuple[str, Tensor]]) -> None:
    with safe_open(file, framework="pt") as handle, torch.no_grad():
        for key, tensor in tensors:
            shape = tuple(handle.get_slice(key).get_shape())
            if shape != tuple(tensor.shape):
                raise _refusal(file, f"{key} has shape {shape} in the file and {tuple(tensor.shape)} in the model")
            tensor.copy_(handle.get_tensor(key))


def _refuse_unexpected(folder: Path, model: PreTrainedModel, names: Iterable[str]) -> None:
    ignored = (*(model._keys_to_ignore_on_load_unexpected or ()), *_RECOMPUTED)
    unexpected = [name for name in names if not _matches(name, ignored)]
    if unexpected:
        raise _refusal(folder, f"{type(model).__name__} does not know {_some(unexpected)}")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _refusal(place: Path, wrong: str) -> UserError:
    return UserError(f"weights of {place}", wrong, "Use the configuration that belongs to these weights")
