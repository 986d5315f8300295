"""Encoded documents as one stream of tokens on disk, and the samples that are cut from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from syncline.data.batch import IGNORED_LABEL

_TOKENS_FILE = "tokens.npy"
_DOCUMENT_STARTS_FILE = "document_starts.npy"


class Sample(NamedTuple):
    """One training sequence: three int64 arrays of shape (max_seq_length,)."""

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    """Already shifted: `labels[s]` follows `input_ids[s]`, or is `IGNORED_LABEL`."""
    position_ids: NDArray[np.int64]


class SampleDataset(Protocol):
    """What the loader needs: samples of one length, by index. An index that is out of range raises `IndexError`."""

    @property
    def token_count(self) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


@dataclass(frozen=True, eq=False)
class PackedDataset:
    """Samples of `max_seq_length` tokens, cut one after another from a stream of documents.

    Sample `i` reads tokens `i * S` to `(i + 1) * S` inclusive, `S = max_seq_length`: its last label is the next
    sample's first input, so that every token but the stream's first is predicted exactly once. The last sample is
    filled up with the end-of-document token under masked labels.
    """

    tokens: NDArray[Any]
    """Every document's tokens, each document ended by its end-of-document token: shape (tokens,), unsigned integers."""
    document_starts: NDArray[np.int64]
    """Where each document begins in `tokens`, ascending; the first is 0."""
    max_seq_length: int
    isolate_documents: bool = False
    """Positions restart at each document, which keeps attention inside it, and no document predicts the next one's
    first token. Otherwise positions count through the sample and attention reaches across documents."""

    @classmethod
    def open(cls, folder: Path, max_seq_length: int, isolate_documents: bool) -> PackedDataset:
        """Maps what `write_packed` wrote; nothing is read until a sample is."""
        tokens = np.load(folder / _TOKENS_FILE, mmap_mode="r")
        return cls(tokens, np.load(folder / _DOCUMENT_STARTS_FILE), max_seq_length, isolate_documents)

    @property
    def token_count(self) -> int:
        return len(self.tokens)

    def __len__(self) -> int:
        return max(0, -(-(len(self.tokens) - 1) // self.max_seq_length))

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        length, start = self.max_seq_length, index * self.max_seq_length
        window = np.asarray(self.tokens[start : start + length + 1], dtype=np.int64)
        predicted = len(window) - 1
        window = np.pad(window, (0, length - predicted), constant_values=self.tokens[-1])
        input_ids, labels, position_ids = window[:-1], window[1:].copy(), np.arange(length)
        labels[predicted:] = IGNORED_LABEL
        if self.isolate_documents:
            restarts = self._document_starts_in(start + 1, start + length) - start
            labels[restarts - 1] = IGNORED_LABEL
            position_ids -= _latest_restart(restarts, length)
        return Sample(input_ids, labels, position_ids)

    def _document_starts_in(self, first: int, last: int) -> NDArray[np.int64]:
        low, high = np.searchsorted(self.document_starts, (first, last + 1))
        return self.document_starts[low:high]


def write_packed(folder: Path, documents: Iterable[NDArray[np.int64]], vocabulary_size: int) -> None:
    """Writes encoded documents into the existing `folder`, token ids as the smallest type that holds them.

    The tokens are never in memory all at once. The caller makes the folder appear as a whole: this writes in place.
    """
    dtype = np.dtype(np.uint16 if vocabulary_size <= 2**16 else np.uint32)
    starts: list[int] = []
    count = 0
    with (folder / _TOKENS_FILE).open("wb") as handle:
        header_bytes = _write_header(handle, dtype, count)
        for tokens in documents:
            starts.append(count)
            count += len(tokens)
            handle.write(tokens.astype(dtype).tobytes())
        handle.seek(0)
        # numpy leaves room in a header for the first axis to grow, so the final one takes the same bytes.
        assert _write_header(handle, dtype, count) == header_bytes
    np.save(folder / _DOCUMENT_STARTS_FILE, np.array(starts, dtype=np.int64))


def _latest_restart(restarts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """For each of `length` places, the largest of `restarts` that is not beyond it, or 0."""
    latest = np.zeros(length, dtype=np.int64)
    inside = restarts[restarts < length]
    latest[inside] = inside
    return np.maximum.accumulate(latest)


def _write_header(handle: IO[bytes], dtype: np.dtype[Any], count: int) -> int:
    """Writes the .npy header of `count` values and returns its size in bytes."""
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(handle, description)
    return handle.tell()
