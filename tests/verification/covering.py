"""Pairwise coverage: few configurations in which every value of every option meets every value of every other."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]
"""Option -> chosen value, which is hashable."""

Pair = tuple[str, Hashable, str, Hashable]

Options = Mapping[str, Sequence[Any]]

Allowed = Callable[[Row], bool]
"""Whether values may stand together; asked of rows in which options are still missing, too. What is allowed can be
completed."""


def anything(row: Row) -> bool:
    return True


def pairwise(options: Options, allowed: Allowed = anything) -> list[Row]:
    """Rows that cover all pairs that are allowed, always the same for the same options.

    Greedy, row by row: the first pair that is missing is taken, then each other option gets the value that covers most
    missing pairs, and of equally good ones the one that has been used least.
    """
    missing = dict.fromkeys(pair for pair in _all_pairs(options) if allowed(_row_of(pair)))
    used: Counter[tuple[str, Hashable]] = Counter()
    rows = []
    while missing:
        row = _row_of(next(iter(missing)))
        for name in options:
            if name not in row:
                row[name] = _best_value(name, options, row, missing, used, allowed)
        row = {name: row[name] for name in options}
        for pair in _pairs_of(row):
            missing.pop(pair, None)
        used.update(row.items())
        rows.append(row)
    return rows


def filled_up(rows: Sequence[Row], options: Options, count: int, seed: int, allowed: Allowed = anything) -> list[Row]:
    """`rows`, and behind them others drawn at random until they are `count`; the same for the same seed.

    A value that stands several times in `options` is drawn more often.
    """
    drawn = random.Random(seed)
    found = list(rows)
    while len(found) < count:
        row: Row = {}
        for name, values in options.items():
            row[name] = drawn.choice([value for value in values if allowed({**row, name: value})])
        if row not in found:
            found.append(row)
    return found


def _best_value(
    name: str,
    options: Options,
    row: Row,
    missing: Mapping[Pair, None],
    used: Counter[tuple[str, Hashable]],
    allowed: Allowed,
) -> Hashable:
    def merit(value: Hashable) -> tuple[int, int]:
        candidate = {other: {**row, name: value}[other] for other in options if other in row or other == name}
        return sum(pair in missing for pair in _pairs_of(candidate)), -used[name, value]

    values = [value for value in options[name] if allowed({**row, name: value})]
    assert values, f"{row} is allowed and cannot be completed by any value of {name}"
    return max(values, key=merit)


def _all_pairs(options: Options) -> Iterator[Pair]:
    for (first, first_values), (second, second_values) in combinations(options.items(), 2):
        for first_value in first_values:
            for second_value in second_values:
                yield first, first_value, second, second_value


def _row_of(pair: Pair) -> Row:
    first, first_value, second, second_value = pair
    return {first: first_value, second: second_value}


def _pairs_of(row: Row) -> Iterator[Pair]:
    for (first, first_value), (second, second_value) in combinations(row.items(), 2):
        yield first, first_value, second, second_value
