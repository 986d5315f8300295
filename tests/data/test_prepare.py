"""Preparation end to end: what comes out, what is kept, and what many processes do at once."""

import multiprocessing
import time
from itertools import chain
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from syncline.data import prepare
from syncline.data.packing import PackedDataset, SampleDataset
from syncline.data.prepare import PreparedData, prepare_data
from syncline.data.random_tokens import RANDOM_TOKENS
from syncline.data.sources import PYTHON_STDLIB
from syncline.errors import UserError

TEXTS = [f"text number {number}, short\n" for number in range(20)]


@pytest.fixture
def text_folder(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number:02d}.txt").write_text(text)
    return folder


def prepared(tmp_path: Path, **options) -> PreparedData:
    defaults = {
        "train_data": str(tmp_path / "texts"),
        "validation_data": None,
        "validation_split": 0.0,
        "text_field": "text",
        "tokenizer_name": "byte",
        "max_seq_length": 16,
        "isolate_documents": False,
        "seed": 1,
        "cache_folder": tmp_path / "cache",
    }
    return prepare_data(**{**defaults, **options})


def packed(dataset: SampleDataset | None) -> PackedDataset:
    assert isinstance(dataset, PackedDataset)
    return dataset


def stream(dataset: SampleDataset | None) -> list[int]:
    return packed(dataset).tokens.tolist()


def tokenizer_of(data: PreparedData) -> PreTrainedTokenizerBase:
    assert data.tokenizer is not None
    return data.tokenizer


def text_of(data: PreparedData, side: str) -> str:
    return str(tokenizer_of(data).decode(stream(getattr(data, side)), skip_special_tokens=True))


def cached_folder(tmp_path: Path) -> Path:
    (folder,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    return folder


def forbid_writing(monkeypatch):
    def fail(*_):
        raise AssertionError("prepared again")

    monkeypatch.setattr(prepare, "_write", fail)


def test_all_the_text_comes_out_in_order(tmp_path, text_folder):
    data = prepared(tmp_path)
    assert text_of(data, "train") == "".join(TEXTS)
    assert data.validation is None
    assert data.vocabulary_size == 257
    assert packed(data.train).document_starts.tolist()[:2] == [0, len(TEXTS[0]) + 1]


def test_split_shares_the_documents_out(tmp_path, text_folder):
    data = prepared(tmp_path, validation_split=0.25)
    sides = [text_of(data, side).splitlines(keepends=True) for side in ("train", "validation")]
    assert [len(side) for side in sides] == [15, 5]
    assert sorted(chain(*sides)) == sorted(TEXTS)


def test_a_single_document_gives_its_end(tmp_path):
    (tmp_path / "input.txt").write_text("".join(TEXTS))
    options = {"train_data": str(tmp_path / "input.txt"), "validation_split": 0.1}
    data = prepared(tmp_path, **options)
    assert text_of(data, "train") == "".join(TEXTS[:18])
    assert text_of(data, "validation") == "".join(TEXTS[18:])
    assert stream(prepared(tmp_path, **options, cache_folder=tmp_path / "other").validation) == stream(data.validation)


def test_validation_data_is_a_source_of_its_own(tmp_path, text_folder):
    (tmp_path / "other.jsonl").write_text('{"text": "other"}\n')
    data = prepared(tmp_path, validation_data=str(tmp_path / "other.jsonl"))
    assert text_of(data, "train") == "".join(TEXTS)
    assert text_of(data, "validation") == "other"


def test_a_trained_tokenizer_does_not_see_the_validation_side(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("abcabc" * 100)
    (tmp_path / "b.txt").write_text("xyzxyz" * 100)
    data = prepared(tmp_path, validation_data=str(tmp_path / "b.txt"), tokenizer_name="train-bpe:260")
    assert len(tokenizer_of(data)("abcabc").input_ids) < 6
    assert len(tokenizer_of(data)("xyzxyz").input_ids) == 6


def test_limit(tmp_path, text_folder):
    assert text_of(prepared(tmp_path, limit_bytes=40), "train") == "".join(TEXTS)[:40]


def test_limit_holds_for_validation_data_too(tmp_path, text_folder):
    (tmp_path / "other.txt").write_text("".join(TEXTS[::-1]))
    data = prepared(tmp_path, validation_data=str(tmp_path / "other.txt"), limit_bytes=40)
    assert text_of(data, "train") == "".join(TEXTS)[:40]
    assert text_of(data, "validation") == "".join(TEXTS[::-1])[:40]


def test_second_call_reads_the_cache_for_any_sequence_length(tmp_path, text_folder, monkeypatch):
    first = prepared(tmp_path, validation_split=0.1, tokenizer_name="train-bpe:260")
    forbid_writing(monkeypatch)
    again = prepared(tmp_path, validation_split=0.1, tokenizer_name="train-bpe:260", max_seq_length=7)
    assert stream(again.train) == stream(first.train)
    assert stream(again.validation) == stream(first.validation)
    assert tokenizer_of(again).get_vocab() == tokenizer_of(first).get_vocab()
    assert again.train[0].input_ids.shape == (7,)


@pytest.mark.parametrize(
    "change",
    [
        {"validation_split": 0.2},
        {"validation_split": 0.1, "seed": 2},
        {"limit_bytes": 50},
        {"tokenizer_name": "train-bpe:258"},
    ],
)
def test_other_options_are_prepared_anew(tmp_path, text_folder, change):
    prepared(tmp_path, validation_split=0.1)
    prepared(tmp_path, **change)
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 2


def test_changed_text_is_prepared_anew(tmp_path, text_folder):
    prepared(tmp_path)
    (text_folder / "00.txt").write_text("something else altogether")
    assert text_of(prepared(tmp_path), "train").startswith("something else altogether")


def test_changed_tokenizer_folder_is_prepared_anew(tmp_path, text_folder):
    tokenizer = tokenizer_of(prepared(tmp_path))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert prepared(tmp_path, tokenizer_name=str(tmp_path / "tokenizer")).vocabulary_size == 257
    tokenizer.add_tokens(["number"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert prepared(tmp_path, tokenizer_name=str(tmp_path / "tokenizer")).vocabulary_size == 258


@pytest.mark.parametrize("name", ["train/tokens.npy", "train/document_starts.npy", "manifest.json"])
def test_truncated_cache_is_rebuilt(tmp_path, text_folder, name):
    expected = stream(prepared(tmp_path).train)
    file = cached_folder(tmp_path) / name
    file.write_bytes(file.read_bytes()[:-10])
    assert stream(prepared(tmp_path).train) == expected


def test_what_a_crash_left_behind_is_replaced(tmp_path, text_folder):
    expected = stream(prepared(tmp_path).train)
    folder = cached_folder(tmp_path)
    folder.rename(folder.with_suffix(".partial"))
    (folder.with_suffix(".partial") / "train" / "tokens.npy").write_bytes(b"half")
    assert stream(prepared(tmp_path).train) == expected
    assert cached_folder(tmp_path) == folder


def test_a_failure_leaves_nothing_behind(tmp_path, text_folder):
    (text_folder / "zz.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match="not UTF-8"):
        prepared(tmp_path)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def _prepare_and_report(tmp_path: Path, barrier: Barrier, results: Queue) -> None:
    def counted_write(*arguments):
        write(*arguments)
        results.put("wrote")

    write = prepare._write
    with patch.object(prepare, "_write", counted_write):
        barrier.wait(timeout=120)
        results.put(stream(prepared(tmp_path, tokenizer_name="train-bpe:260").train))


def test_two_processes_at_once_prepare_once(tmp_path, text_folder):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    other = context.Process(target=_prepare_and_report, args=(tmp_path, barrier, results))
    other.start()
    _prepare_and_report(tmp_path, barrier, results)
    messages = [results.get(timeout=60) for _ in range(3)]
    other.join(timeout=60)
    assert other.exitcode == 0
    messages.remove("wrote")
    assert messages[0] == messages[1] == stream(prepared(tmp_path, tokenizer_name="train-bpe:260").train)


def test_waiting_has_an_end_that_names_the_lock(tmp_path, text_folder):
    prepared(tmp_path)
    folder = cached_folder(tmp_path)
    (folder / "manifest.json").unlink()
    with (
        FileLock(tmp_path / "cache" / f"{folder.name}.lock", thread_local=False),
        pytest.raises(UserError, match=rf"{folder.name}\.lock"),
    ):
        prepared(tmp_path, lock_timeout_seconds=0.01)


def test_cache_folder_that_cannot_be_written(tmp_path, text_folder):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        prepared(tmp_path, cache_folder=tmp_path / "file" / "cache")


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5])
def test_share_out_of_range(tmp_path, text_folder, share):
    with pytest.raises(UserError, match=f"validation_split {share}"):
        prepared(tmp_path, validation_split=share)


def test_two_ways_to_hold_out(tmp_path, text_folder):
    with pytest.raises(UserError, match="only one can decide"):
        prepared(tmp_path, validation_data=PYTHON_STDLIB, validation_split=0.1)


def test_random_tokens_may_stand_in_a_list(tmp_path):
    options = {"train_data": [RANDOM_TOKENS], "vocabulary_size": 50, "random_token_samples": 4}
    assert len(prepared(tmp_path, **options).train) == 4


def test_random_tokens_are_seeded_and_need_no_text(tmp_path):
    options = {"train_data": RANDOM_TOKENS, "vocabulary_size": 50, "random_token_samples": 40, "validation_split": 0.1}
    first, again, other = (prepared(tmp_path, **options, seed=seed) for seed in (3, 3, 4))
    assert first.tokenizer is None
    assert first.validation is not None
    assert (len(first.train), len(first.validation), first.vocabulary_size) == (40, 4, 50)
    rows = np.stack([first.train[index].input_ids for index in range(40)])
    assert (rows.min(), rows.max()) == (0, 49)
    assert np.array_equal(rows, np.stack([again.train[index].input_ids for index in range(40)]))
    assert not np.array_equal(rows[0], other.train[0].input_ids)
    assert not any(np.array_equal(row, first.validation[0].input_ids) for row in rows)
    sample = first.train[7]
    assert sample.input_ids[1:].tolist() == sample.labels[:-1].tolist()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vocabulary_size": None}, "vocabulary size"),
        ({"random_token_samples": None}, "number of samples"),
        ({"validation_data": PYTHON_STDLIB}, "validation_split instead"),
    ],
)
def test_random_tokens_lacking_something(tmp_path, change, said):
    options = {"train_data": RANDOM_TOKENS, "vocabulary_size": 50, "random_token_samples": 40, **change}
    with pytest.raises(UserError, match=said):
        prepared(tmp_path, **options)


def test_the_standard_library_is_ready_in_seconds(tmp_path):
    options = {
        "train_data": PYTHON_STDLIB,
        "tokenizer_name": "train-bpe:1024",
        "max_seq_length": 128,
        "validation_split": 0.05,
        "limit_bytes": 1_000_000,
    }
    started = time.perf_counter()
    data = prepared(tmp_path, **options)
    prepared_at = time.perf_counter()
    prepared(tmp_path, **options)
    warm = time.perf_counter() - prepared_at
    assert len(tokenizer_of(data)) == 1024
    assert data.validation is not None
    assert len(data.train) > 10 * len(data.validation) > 0
    assert prepared_at - started < 15, "about 1 s on two idle cores"
    assert warm < 2, "about 0.02 s on two idle cores"
