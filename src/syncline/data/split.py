"""Which documents are held out for validation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from syncline.errors import UserError


@dataclass(frozen=True)
class ValidationSplit:
    """Documents whose seeded hash is at most `threshold` are for validation.

    The hash is of the text: the split does not depend on the documents' order, and copies of a text stay together.
    """

    seed: int
    threshold: bytes

    def train(self, documents: Iterable[str]) -> Subset:
        return Subset(documents, self, held_out=False)

    def validation(self, documents: Iterable[str]) -> Subset:
        return Subset(documents, self, held_out=True)

    def holds_out(self, text: str) -> bool:
        return _seeded_hash(text, self.seed) <= self.threshold


@dataclass(frozen=True)
class Subset:
    """The documents of one side, in their order; like the documents it can be iterated again and again."""

    documents: Iterable[str]
    split: ValidationSplit
    held_out: bool

    def __iter__(self) -> Iterator[str]:
        return (text for text in self.documents if self.split.holds_out(text) == self.held_out)


def split_documents(documents: Iterable[str], share: float, seed: int) -> ValidationSplit:
    """Holds out `share` of the documents, rounded, and at least one of them on either side. Reads them once.

    Raises `UserError` when that cannot be: with a single document, or nothing but copies of one.
    """
    assert 0 < share < 1
    hashes = sorted(_seeded_hash(text, seed) for text in documents)
    distinct = sorted(set(hashes))
    if len(distinct) < 2:
        wrong = f"the training data holds {len(hashes)} document(s), and {len(distinct)} distinct one(s), to share out"
        instead = "Name validation_data instead, or divide the text into more documents"
        raise UserError(f"validation_split {share}", wrong, instead)
    held_out = max(1, round(share * len(hashes)))
    return ValidationSplit(seed, min(hashes[held_out - 1], distinct[-2]))


def _seeded_hash(text: str, seed: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16, key=str(seed).encode()).digest()
