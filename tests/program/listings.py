"""Programs as text, to be compared with what a test expects."""

from __future__ import annotations

from textwrap import dedent

from syncline.program.display.text import listing
from syncline.program.program import Program


def assert_listing(program: Program, rank: int, expected: str) -> None:
    assert listing(program, rank) == lines_of(expected)


def lines_of(text: str) -> list[str]:
    return dedent(text).strip().splitlines()


def section(program: Program, rank: int, first: str, last: str) -> list[str]:
    """A part of the listing, both ends included."""
    lines = listing(program, rank)
    start = lines.index(first)
    return lines[start : lines.index(last, start) + 1]
