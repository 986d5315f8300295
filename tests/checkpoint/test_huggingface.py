import json
import struct
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from syncline.checkpoint.huggingface import finish_folder, save_stage_weights
from tests.modeling.families import FAMILIES, tiny_config, tiny_stages


def save(folder, config, stages, dtype=torch.float32, tokenizer=None, seed=5):
    parts = tiny_stages(config, stages, seed=seed, dtype=dtype)
    for part in parts:
        save_stage_weights(folder, part, stages)
    finish_folder(folder, config, tokenizer, stages)
    return {name: parameter for part in parts for name, parameter in part.parameters_by_name().items()}


def load(folder):
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, information = loaded
    assert not any(information.values()), information
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_exactly_what_was_saved(family, tied, tmp_path):
    config = tiny_config(family, layers=3, tied=tied)
    folder = tmp_path / "model"
    saved = save(folder, config, 1 if family == "gpt2" else 3)
    model = load(folder)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, saved[name]), name


def test_the_folder_is_complete(tmp_path):
    folder = tmp_path / "deep" / "model"
    config = tiny_config("llama", tied=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    saved = save(folder, config, 2, dtype=torch.bfloat16, tokenizer=tokenizer)
    assert {path.name for path in folder.iterdir()} >= {
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    }
    written = json.loads((folder / "config.json").read_text())
    assert written["dtype"] == "bfloat16"
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert written["use_cache"] is True
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == saved.keys() - {"lm_head.weight"}
    assert index["metadata"]["total_size"] == 2 * sum(
        parameter.numel() for name, parameter in saved.items() if name != "lm_head.weight"
    )
    assert AutoTokenizer.from_pretrained(folder)("b")["input_ids"] == [1]
    assert {parameter.dtype for parameter in load(folder).parameters()} == {torch.bfloat16}


def test_nothing_is_under_the_name_before_all_is_written(tmp_path):
    folder = tmp_path / "model"
    config = tiny_config("llama")
    first, last = tiny_stages(config, 2)
    save_stage_weights(folder, first, 2)
    assert not folder.exists()
    with pytest.raises(FileNotFoundError):
        finish_folder(folder, config, None, 2)
    assert not folder.exists()
    save_stage_weights(folder, last, 2)
    finish_folder(folder, config, None, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_older_folder_and_an_interrupted_attempt_leave_nothing_behind(tmp_path):
    folder = tmp_path / "model"
    config = tiny_config("llama")
    save(folder, config, 2, seed=1)
    (folder / "note.txt").write_text("of the older folder")
    save_stage_weights(folder, tiny_stages(config, 3)[0], 3)
    saved = save(folder, config, 1, seed=2)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert {path.name for path in folder.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    assert torch.equal(load(folder).lm_head.weight, saved["lm_head.weight"])


def test_parameters_that_are_views_of_one_buffer_are_saved_apart(tmp_path):
    config = tiny_config("llama")
    (stage,) = tiny_stages(config, 1, dtype=torch.float32)
    parameters = stage.parameters_by_name()
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters.values()])
    pieces = flat.split([parameter.numel() for parameter in parameters.values()])
    for parameter, piece in zip(parameters.values(), pieces, strict=True):
        parameter.data = piece.view(parameter.shape)
    save_stage_weights(tmp_path / "model", stage, 1)
    finish_folder(tmp_path / "model", config, None, 1)
    with (tmp_path / "model" / "model.safetensors").open("rb") as file:
        (header,) = struct.unpack("<Q", file.read(8))
    assert (tmp_path / "model" / "model.safetensors").stat().st_size == 8 + header + 4 * flat.numel()
    model = load(tmp_path / "model")
    assert all(torch.equal(parameter, parameters[name]) for name, parameter in model.named_parameters())
