"""Which documents, or which end of a single one, are held out for validation."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from syncline.errors import UserError


class ValidationSplit(ABC):
    """How documents are shared out between training and validation."""

    def train(self, documents: Iterable[str]) -> Side:
        return Side(documents, self, held_out=False)

    def validation(self, documents: Iterable[str]) -> Side:
        return Side(documents, self, held_out=True)

    @abstractmethod
    def parts(self, text: str) -> tuple[str | None, str | None]:
        """What of a document is for training, and what for validation; None for nothing."""


@dataclass(frozen=True)
class WholeDocuments(ValidationSplit):
    """Documents whose seeded hash is at most `threshold` are for validation.

    The hash is of the text: the split does not depend on the documents' order, and copies of a text stay together.
    """

    seed: int
    threshold: bytes

    def parts(self, text: str) -> tuple[str | None, str | None]:
        return (None, text) if _seeded_hash(text, self.seed) <= self.threshold else (text, None)


@dataclass(frozen=True)
class EndOfDocument(ValidationSplit):
    """The last `share` of a document's characters is for validation; neither part is empty.

    The cut moves to the nearest line end, if there is one within a tenth of the document.
    """

    share: float

    def parts(self, text: str) -> tuple[str | None, str | None]:
        wanted = len(text) - min(max(1, round(self.share * len(text))), len(text) - 1)
        line_ends = (text.rfind("\n", 0, wanted) + 1, text.find("\n", wanted) + 1)
        near = [end for end in line_ends if 0 < end < len(text) and abs(end - wanted) <= len(text) / 10]
        cut = min(near, key=lambda end: abs(end - wanted), default=wanted)
        return text[:cut], text[cut:]


@dataclass(frozen=True)
class Side:
    """The documents of one side, in their order; like the documents it can be iterated again and again."""

    documents: Iterable[str]
    split: ValidationSplit
    held_out: bool

    def __iter__(self) -> Iterator[str]:
        parts = (self.split.parts(text)[self.held_out] for text in self.documents)
        return (part for part in parts if part is not None)


def split_documents(documents: Iterable[str], share: float, seed: int) -> ValidationSplit:
    """Holds out `share` of the documents, rounded, and at least one of them on either side. Reads them once.

    Of a single document, or of each copy of it, the end is held out. Raises `UserError` when it is too short for that.
    """
    assert 0 < share < 1
    hashes: list[bytes] = []
    longest = 0
    for text in documents:
        hashes.append(_seeded_hash(text, seed))
        longest = max(longest, len(text))
    hashes.sort()
    distinct = sorted(set(hashes))
    if len(distinct) >= 2:
        held_out = max(1, round(share * len(hashes)))
        return WholeDocuments(seed, min(hashes[held_out - 1], distinct[-2]))
    if longest < 2:
        wrong = f"the training data is {longest} character(s) long, of which none can be held out"
        raise UserError(f"validation_split {share}", wrong, "Write validation_split: 0, or give more text")
    return EndOfDocument(share)


def _seeded_hash(text: str, seed: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16, key=str(seed).encode()).digest()
