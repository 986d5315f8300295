from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from syncline.checkpoint.huggingface import finish_folder, save_stage_weights
from syncline.checkpoint.tokenizer import PROBE, reloads_alike
from syncline.data.sources import documents
from syncline.data.tokenizer import byte_tokenizer, load_tokenizer
from tests.modeling.families import tiny_config, tiny_stages


@pytest.mark.parametrize(("family", "alike"), [("llama", True), ("qwen3", True), ("qwen2", False)])
def test_what_transformers_makes_of_the_exported_tokenizer(family: str, alike: bool, tmp_path: Path):
    config = tiny_config(family, layers=1, tied=False)
    (stage,) = tiny_stages(config, 1)
    save_stage_weights(tmp_path / "model", stage, 1)
    tokenizer = load_tokenizer("train-bpe:400", documents("python-stdlib", limit_bytes=100_000))
    finish_folder(tmp_path / "model", config, tokenizer, 1)
    assert reloads_alike(tmp_path / "model", tokenizer) is alike
    read = PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    assert read.encode(PROBE) == tokenizer.encode(PROBE)


def test_a_folder_without_a_tokenizer_gives_none_back(tmp_path: Path):
    assert not reloads_alike(tmp_path, byte_tokenizer())
