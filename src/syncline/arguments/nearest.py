"""The known word that an unknown one most resembles."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """The member of `known` (not empty) that is closest to `word`, letter case aside."""
    from difflib import SequenceMatcher

    return max(known, key=lambda candidate: SequenceMatcher(None, word.lower(), candidate.lower()).ratio())
