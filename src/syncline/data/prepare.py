"""From the data options to datasets, prepared once per machine and kept."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from syncline.data.packing import PackedDataset, SampleDataset, write_packed
from syncline.data.random_tokens import RANDOM_TOKENS, RandomTokenDataset
from syncline.data.sources import Documents, documents, fingerprint_files
from syncline.data.split import split_documents
from syncline.data.tokenizer import encode_documents, load_tokenizer, pretrained_tokenizer, vocabulary_extent
from syncline.errors import UserError

_FORMAT_VERSION = 1
_MANIFEST = "manifest.json"
_TRAIN, _VALIDATION, _TOKENIZER = "train", "validation", "tokenizer"


@dataclass(frozen=True)
class PreparedData:
    train: SampleDataset
    validation: SampleDataset | None
    tokenizer: PreTrainedTokenizerBase | None
    """None for random tokens, which have no text."""
    vocabulary_size: int
    """The largest token id that may occur plus one: the fewest rows that an embedding may have."""


def prepare_data(
    *,
    train_data: str | Sequence[str],
    validation_data: str | Sequence[str] | None,
    validation_split: float,
    text_field: str,
    tokenizer_name: str,
    max_seq_length: int,
    isolate_documents: bool,
    seed: int,
    cache_folder: Path,
    vocabulary_size: int | None = None,
    random_token_samples: int | None = None,
    limit_bytes: int | None = None,
    lock_timeout_seconds: float = 1800.0,
) -> PreparedData:
    """The training and validation samples that the options ask for.

    Text comes from `train_data` (see `sources.documents`) and is encoded by `tokenizer_name` (see
    `tokenizer.load_tokenizer`). Validation samples come from `validation_data`, or from the share `validation_split` of
    the training documents (see `split.split_documents`), or there are none. At most `limit_bytes` are read of either
    data. What was prepared stays in `cache_folder` until the files or the options change. Any number of processes may
    call this at once: one prepares while the others wait.

    `random-tokens` makes `random_token_samples` training samples below `vocabulary_size` from the seed, and further
    ones for validation, `validation_split` times as many. Raises `UserError` for what cannot be read, split or used.
    """
    if not 0 <= validation_split < 1:
        raise UserError(
            f"validation_split {validation_split}", "it is not a share", "Write 0 for none, or such as 0.05"
        )
    if validation_data is not None and validation_split:
        given = f"validation_split {validation_split} beside validation_data"
        raise UserError(
            given, "only one can decide what is held out", "Leave out validation_data, or set the split to 0"
        )
    if train_data == RANDOM_TOKENS or list(train_data) == [RANDOM_TOKENS]:
        return _random_data(
            validation_data, validation_split, max_seq_length, seed, vocabulary_size, random_token_samples
        )
    request = _Request(
        documents(train_data, text_field, limit_bytes),
        None if validation_data is None else documents(validation_data, text_field, limit_bytes, "validation_data"),
        validation_split,
        tokenizer_name,
        seed,
    )
    folder = _prepared_folder(request, Path(cache_folder), lock_timeout_seconds)
    return _open(folder, max_seq_length, isolate_documents)


@dataclass(frozen=True)
class _Request:
    """All that decides the tokens. How they are cut into samples does not."""

    train: Documents
    validation: Documents | None
    validation_split: float
    tokenizer_name: str
    seed: int

    def key(self) -> str:
        tokenizer_files = sorted(path for path in Path(self.tokenizer_name).glob("*") if path.is_file())
        parts = (
            _FORMAT_VERSION,
            self.train.fingerprint(),
            self.validation.fingerprint() if self.validation else None,
            (self.validation_split, self.seed) if self.validation_split else None,
            self.tokenizer_name,
            fingerprint_files(tokenizer_files),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _random_data(
    validation_data: str | Sequence[str] | None,
    validation_split: float,
    max_seq_length: int,
    seed: int,
    vocabulary_size: int | None,
    sample_count: int | None,
) -> PreparedData:
    given = f"train_data {RANDOM_TOKENS!r}"
    if validation_data is not None:
        raise UserError(given, "it cannot be validated on text", "Set validation_split instead of validation_data")
    if vocabulary_size is None or sample_count is None:
        wrong = "it needs the vocabulary size and the number of samples"
        raise UserError(given, wrong, "Give a model with a vocabulary size, and random_token_samples")
    train = RandomTokenDataset(sample_count, max_seq_length, vocabulary_size, seed)
    validation = None
    if validation_split:
        held_out = max(1, round(validation_split * sample_count))
        validation = RandomTokenDataset(held_out, max_seq_length, vocabulary_size, seed, first_sample=sample_count)
    return PreparedData(train, validation, None, vocabulary_size)


def _prepared_folder(request: _Request, cache_folder: Path, lock_timeout_seconds: float) -> Path:
    """The folder of `request` in the cache, written by this process or another; it is always whole."""
    key = request.key()
    folder = cache_folder / key
    if _is_whole(folder):
        return folder
    try:
        cache_folder.mkdir(parents=True, exist_ok=True)
        with FileLock(cache_folder / f"{key}.lock", timeout=lock_timeout_seconds):
            if not _is_whole(folder):
                _write(request, folder)
    except Timeout as error:
        wrong = (
            f"another process has held {error.lock_file} for more than {lock_timeout_seconds:g} s to prepare the data"
        )
        instead = "Wait for it or end it (fuser names it), then start again"
        raise UserError(f"the data cache {cache_folder}", wrong, instead) from error
    except OSError as error:
        instead = "Name a folder that can be written, with space left"
        raise UserError(f"the data cache {cache_folder}", f"it cannot be written: {error}", instead) from error
    return folder


def _write(request: _Request, folder: Path) -> None:
    """Writes all of `folder` beside it, then puts it in place. The caller holds the lock."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        _write_contents(request, partial)
        (partial / _MANIFEST).write_text(json.dumps({"sizes": _sizes(partial)}, indent=2))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_contents(request: _Request, folder: Path) -> None:
    train: Iterable[str] = request.train
    validation: Iterable[str] | None = request.validation
    if request.validation_split:
        split = split_documents(request.train, request.validation_split, request.seed)
        train, validation = split.train(request.train), split.validation(request.train)
    # Trained on the training side alone, the tokenizer has not seen what validates.
    tokenizer = load_tokenizer(request.tokenizer_name, train)
    tokenizer.save_pretrained(folder / _TOKENIZER)
    for name, texts in ((_TRAIN, train), (_VALIDATION, validation)):
        if texts is not None:
            (folder / name).mkdir()
            write_packed(folder / name, encode_documents(tokenizer, texts), vocabulary_extent(tokenizer))


def _open(folder: Path, max_seq_length: int, isolate_documents: bool) -> PreparedData:
    # The tokenizer is the one that made the tokens, even if its origin has changed or is out of reach.
    tokenizer = pretrained_tokenizer(str(folder / _TOKENIZER))
    validation = None
    if (folder / _VALIDATION).is_dir():
        validation = PackedDataset.open(folder / _VALIDATION, max_seq_length, isolate_documents)
    train = PackedDataset.open(folder / _TRAIN, max_seq_length, isolate_documents)
    return PreparedData(train, validation, tokenizer, vocabulary_extent(tokenizer))


def _is_whole(folder: Path) -> bool:
    """Whether every file is there in its full size; false for a folder that a crash or a full disk cut short."""
    try:
        sizes = json.loads((folder / _MANIFEST).read_text())["sizes"]
    except (OSError, ValueError, KeyError):
        return False
    return bool(sizes == _sizes(folder))


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != _MANIFEST)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
