"""Pieces of Markdown, line by line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def code(language: str, lines: Iterable[str]) -> str:
    """A fenced block."""
    return "\n".join([f"```{language}", *lines, "```"])


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """A table and an empty line."""
    yield _row(head)
    yield _row(("---",) * len(head))
    yield from (_row(row) for row in rows)
    yield ""


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
