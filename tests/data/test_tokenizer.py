"""Tokenizers keep the text, leave as Hugging Face folders, and refuse clearly."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers, processors
from transformers import AutoTokenizer

from syncline.data import tokenizer as tokenizer_module
from syncline.data.sources import PYTHON_STDLIB, documents
from syncline.data.tokenizer import (
    END_OF_DOCUMENT,
    byte_tokenizer,
    encode_documents,
    load_tokenizer,
    train_bpe,
    vocabulary_extent,
)
from syncline.errors import UserError

BYTES = byte_tokenizer()
TEXT = 'def f(x):\n    return "é 你好 \U0001f30d" + x  # 1234567 \t\r\n\n\n'


@pytest.fixture(scope="module")
def standard_library():
    return list(documents(PYTHON_STDLIB, limit_bytes=400_000))


@pytest.fixture(scope="module")
def bpe(standard_library):
    return load_tokenizer("train-bpe:512", standard_library)


def test_byte_tokens_are_the_bytes():
    assert BYTES(TEXT).input_ids == list(TEXT.encode())
    assert set(tokenizer_module._byte_characters()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert (len(BYTES), vocabulary_extent(BYTES), BYTES.eos_token_id) == (257, 257, 256)


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_byte_tokenizer_round_trips_any_text(text):
    ids = BYTES(text).input_ids
    assert ids == list(text.encode())
    assert BYTES.decode(ids) == text


def test_bpe_round_trips_and_compresses(bpe):
    ids = bpe(TEXT).input_ids
    assert bpe.decode(ids) == TEXT
    assert len(ids) < len(TEXT.encode())


def test_bpe_has_the_size_that_was_asked_for(bpe):
    assert (len(bpe), vocabulary_extent(bpe)) == (512, 512)
    assert bpe.eos_token == END_OF_DOCUMENT


def test_bpe_training_is_deterministic(bpe, standard_library):
    assert load_tokenizer("train-bpe:512", standard_library).get_vocab() == bpe.get_vocab()


def test_bpe_sample_is_bounded_and_spread_over_all_the_text():
    text = "".join(f"{number:06d}\n" for number in range(200_000))
    pieces = list(tokenizer_module._evenly_spread_pieces([text, text], 100_000))
    assert sum(map(len, pieces)) <= 110_000
    starts = [int(piece[:6]) for piece in pieces]
    gaps = np.diff([0, *(start for start in starts)])
    assert max(np.abs(gaps[gaps > 0])) < 40_000
    assert max(starts) > 180_000


@pytest.mark.parametrize("name", ["byte", "bpe"])
def test_exported_folder_is_a_hugging_face_tokenizer(name, bpe, tmp_path):
    original = BYTES if name == "byte" else bpe
    original.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path), [])):
        assert loaded(TEXT).input_ids == original(TEXT).input_ids
        assert loaded.decode(loaded(TEXT).input_ids) == TEXT
        assert loaded.eos_token_id == original.eos_token_id


def test_encoding_ends_every_document(bpe):
    texts = ["a", TEXT, "b b b"]
    encoded = list(encode_documents(bpe, texts))
    assert [tokens.tolist() for tokens in encoded] == [[*bpe(text).input_ids, bpe.eos_token_id] for text in texts]
    assert all(tokens.dtype == np.int64 for tokens in encoded)


def test_encoding_begins_a_document_as_the_tokenizer_does():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = template
    assert next(encode_documents(tokenizer, ["a"])).tolist() == [257, ord("a"), 256]


def test_long_documents_and_many_batches_keep_every_token(monkeypatch):
    monkeypatch.setattr(tokenizer_module, "_ENCODED_PIECE_CHARACTERS", 7)
    monkeypatch.setattr(tokenizer_module, "_ENCODED_BATCH_CHARACTERS", 20)
    texts = ["short", "a line\nanother line\n" * 5, "x" * 50, "\n" * 9, "end"]
    assert [tokens.tolist() for tokens in encode_documents(BYTES, texts)] == [[*text.encode(), 256] for text in texts]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train-bpe:many", "not a whole number"),
        ("train-bpe:256", "at least 257"),
        ("train-bpe:-1", "at least 257"),
        ("./no/such/folder", "no such folder"),
    ],
)
def test_names_that_mean_nothing(name, said):
    with pytest.raises(UserError, match=said) as caught:
        load_tokenizer(name, ["text"])
    assert name in str(caught.value)


def test_too_little_text_for_the_vocabulary():
    with pytest.raises(UserError, match=r"Write train-bpe:25[89]"):
        train_bpe(1000, ["abab"] * 5)


def test_folder_that_holds_no_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path), [])


def test_tokenizer_without_an_end(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="eos_token"):
        load_tokenizer(str(tmp_path), [])


def test_hub_name_out_of_reach(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="some-owner/some-tokenizer") as caught:
        load_tokenizer("some-owner/some-tokenizer", [])
    assert "\n" not in str(caught.value)
