"""Two programs side by side: what an option adds, removes and moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest

from syncline.program.display.text import bucket_table, kinds_of_ranks, listing, summary_lines
from syncline.program.program import Program

CONTEXT = 2
"""Lines that both programs have, shown around each difference."""

SAME, MOVED = " ", "~"


@dataclass(frozen=True)
class Row:
    """A line of each program, empty where it has none there, and what is to be said of each of them."""

    left: str
    right: str
    left_mark: str = SAME
    right_mark: str = SAME


def compare(left: Program, right: Program, titles: tuple[str, str], ranks: Sequence[int] | None = None) -> str:
    """Both programs in two columns, rank by rank, with the lines around every difference, and how many differ.

    `~` marks an action that stands elsewhere in the other program, `<` one that only the left has, `>` one that only
    the right has.
    """
    sections: list[tuple[str, list[Row]]] = []
    for rank in ranks if ranks is not None else _shown(left, right):
        lines = [listing(program, rank) if rank < len(program.ranks) else [] for program in (left, right)]
        sections.append((f"rank {rank}", list(_rows(*lines))))
    tables = [[*bucket_table(program)] for program in (left, right)]
    if tables[0] != tables[1]:
        sections.insert(0, ("buckets", list(_rows(*tables))))
    sections.append(("summary", list(_rows(summary_lines(left), summary_lines(right)))))
    width = max(len(row.left) for _, rows in sections for row in rows)
    parts = [f"  {titles[0]:<{width}}     {titles[1]}"]
    for title, rows in sections:
        if any(row.left_mark != SAME or row.right_mark != SAME for row in rows):
            parts += ["", f"{title}: {_count(rows)}", *_columns(rows, width)]
        else:
            parts += ["", f"{title}: the same"]
    return "\n".join(parts)


def _shown(left: Program, right: Program) -> list[int]:
    """One rank of each kind, in either program."""
    firsts = {ranks[0] for program in (left, right) for ranks in kinds_of_ranks(program)}
    return sorted(firsts)


def _rows(left: Sequence[str], right: Sequence[str]) -> Iterator[Row]:
    only_left, only_right = Counter(left) - Counter(right), Counter(right) - Counter(left)
    for tag, i, i_end, j, j_end in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if tag == "equal":
            yield from (Row(line, line) for line in left[i:i_end])
            continue
        for one, other in zip_longest(left[i:i_end], right[j:j_end]):
            marks = [
                SAME if line is None else _mark(line, only, mark)
                for line, only, mark in ((one, only_left, "<"), (other, only_right, ">"))
            ]
            yield Row(one or "", other or "", *marks)


def _mark(line: str, only: Counter[str], mark: str) -> str:
    """Whether the other program has the line too, somewhere else."""
    if only[line] > 0:
        only[line] -= 1
        return mark
    return MOVED


def _count(rows: Sequence[Row]) -> str:
    marks = Counter(mark for row in rows for mark in (row.left_mark, row.right_mark))
    # A moved line is seen where it comes from and where it goes to.
    numbers = ((marks[MOVED] + 1) // 2, "moved"), (marks["<"], "only on the left"), (marks[">"], "only on the right")
    return ", ".join(f"{count} {what}" for count, what in numbers if count)


def _columns(rows: Sequence[Row], width: int) -> Iterator[str]:
    changed = [index for index, row in enumerate(rows) if row.left_mark != SAME or row.right_mark != SAME]
    near = {index + step for index in changed for step in range(-CONTEXT, CONTEXT + 1)}
    hidden = 0
    for index, row in enumerate(rows):
        if index not in near:
            hidden += 1
            continue
        if hidden:
            yield f"  ... {hidden} the same ..."
            hidden = 0
        yield f"{row.left_mark} {row.left:<{width}}   {row.right_mark} {row.right}".rstrip()
    if hidden:
        yield f"  ... {hidden} the same ..."
