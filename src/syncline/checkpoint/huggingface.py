"""A trained model written as a Hugging Face folder that `from_pretrained` loads.

A folder is written by the pipeline ranks of one replica together. Each calls `save_stage_weights`; after a barrier,
which is the caller's, one of them calls `finish_folder`. Until then all lies in a hidden folder beside the target,
which is renamed at the very end: a folder under the target's name is always whole.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from syncline.modeling.pipeline.stage import Stage

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

Header = dict[str, dict[str, Any]]

_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class Tokenizer(Protocol):
    """What can write itself into a folder, as the tokenizers of transformers do."""

    def save_pretrained(self, save_directory: str) -> object: ...


def save_stage_weights(folder: Path | str, stage: Stage, stages: int) -> None:
    """Write the stage's parameters and persistent buffers as its share of the folder, in their own dtypes.

    A parameter whose first copy lies on an earlier stage is left to that stage, as transformers does with tied weights.
    """
    partial = _partial(Path(folder))
    partial.mkdir(parents=True, exist_ok=True)
    tied = _later_names(stage)
    tensors = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in stage.model.state_dict().items()
        if name not in tied
    }
    save_file(tensors, partial / _shard_name(stage.index, stages), metadata={"format": "pt"})


def finish_folder(folder: Path | str, config: PreTrainedConfig, tokenizer: Tokenizer | None, stages: int) -> None:
    """Complete the folder whose shares all stages have written, and put it in place of what is there under its name.

    Writes the index of the shares, config.json (`dtype` and `architectures` included), generation_config.json and the
    tokenizer.
    """
    folder = Path(folder)
    partial = _partial(folder)
    shards = [_shard_name(stage, stages) for stage in range(stages)]
    _remove_all_but(partial, shards)
    headers = [_read_header(partial / shard) for shard in shards]
    if stages > 1:
        _write_index(partial, shards, headers)
    _write_config(partial, config, headers)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(partial))
    _replace(folder, partial)


def _shard_name(stage: int, stages: int) -> str:
    return WEIGHTS_FILE if stages == 1 else f"model-{stage + 1:05}-of-{stages:05}.safetensors"


def _partial(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def _later_names(stage: Stage) -> set[str]:
    """All names of tied parameters but their first: within the stage, and where the first copy is on another stage."""
    every_name = {name for name, _ in stage.model.named_parameters(remove_duplicate=False)}
    return every_name - stage.parameters_by_name().keys() | stage.tied_sources.keys()


def _remove_all_but(partial: Path, names: Iterable[str]) -> None:
    """What an interrupted attempt may have left."""
    for path in partial.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in names:
            path.unlink()


def _read_header(path: Path) -> Header:
    """The safetensors header: name -> {"dtype", "shape", "data_offsets"}."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return header


def _write_index(partial: Path, shards: list[str], headers: list[Header]) -> None:
    weight_map = {name: shard for shard, header in zip(shards, headers, strict=True) for name in header}
    index = {"metadata": {"total_size": sum(_sizes_by_dtype(headers).values())}, "weight_map": weight_map}
    (partial / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_config(partial: Path, config: PreTrainedConfig, headers: list[Header]) -> None:
    config = deepcopy(config)
    sizes = _sizes_by_dtype(headers)
    config.dtype = getattr(torch, _DTYPES[max(sizes, key=sizes.__getitem__)])
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(partial)
    GenerationConfig.from_model_config(config).save_pretrained(partial)


def _sizes_by_dtype(headers: list[Header]) -> Counter[str]:
    """Bytes held in each dtype."""
    sizes: Counter[str] = Counter()
    for header in headers:
        for tensor in header.values():
            start, end = tensor["data_offsets"]
            sizes[tensor["dtype"]] += end - start
    return sizes


def _replace(folder: Path, partial: Path) -> None:
    former = folder.with_name(f".{folder.name}.former")
    if folder.exists():
        shutil.rmtree(former, ignore_errors=True)
        folder.rename(former)
    partial.rename(folder)
    shutil.rmtree(former, ignore_errors=True)
