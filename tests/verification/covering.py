"""Pairwise coverage: few configurations in which every value of every option meets every value of every other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import combinations

Row = dict[str, Hashable]
"""Option -> chosen value."""

Pair = tuple[str, Hashable, str, Hashable]


def pairwise(options: Mapping[str, Sequence[Hashable]]) -> list[Row]:
    """Rows that cover all pairs, always the same for the same options.

    Greedy, row by row: the first pair that is missing is taken, then each other option gets the value that covers most
    missing pairs, and of equally good ones the one that has been used least.
    """
    missing = dict.fromkeys(_all_pairs(options))
    used: Counter[tuple[str, Hashable]] = Counter()
    rows = []
    while missing:
        first, first_value, second, second_value = next(iter(missing))
        row: Row = {first: first_value, second: second_value}
        for name in options:
            if name not in row:
                row[name] = _best_value(name, options, row, missing, used)
        row = {name: row[name] for name in options}
        for pair in _pairs_of(row):
            missing.pop(pair, None)
        used.update(row.items())
        rows.append(row)
    return rows


def _best_value(
    name: str,
    options: Mapping[str, Sequence[Hashable]],
    row: Row,
    missing: Mapping[Pair, None],
    used: Counter[tuple[str, Hashable]],
) -> Hashable:
    def merit(value: Hashable) -> tuple[int, int]:
        candidate = {other: {**row, name: value}[other] for other in options if other in row or other == name}
        return sum(pair in missing for pair in _pairs_of(candidate)), -used[name, value]

    return max(options[name], key=merit)


def _all_pairs(options: Mapping[str, Sequence[Hashable]]) -> Iterator[Pair]:
    for (first, first_values), (second, second_values) in combinations(options.items(), 2):
        for first_value in first_values:
            for second_value in second_values:
                yield first, first_value, second, second_value


def _pairs_of(row: Row) -> Iterator[Pair]:
    for (first, first_value), (second, second_value) in combinations(row.items(), 2):
        yield first, first_value, second, second_value
