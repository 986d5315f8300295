from itertools import combinations, product

from tests.verification.configurations import OPTIONS, covering_choices
from tests.verification.covering import filled_up, pairwise


def test_every_pair_of_values_is_in_some_row():
    rows = covering_choices()
    for first, second in combinations(OPTIONS, 2):
        assert {(row[first], row[second]) for row in rows} == set(product(OPTIONS[first], OPTIONS[second]))


def test_rows_are_few_and_always_the_same():
    rows = covering_choices()
    assert rows == covering_choices()
    *_, second, most = sorted(map(len, OPTIONS.values()))
    assert second * most <= len(rows) <= 1.25 * second * most


def test_two_options_need_their_product():
    assert len(pairwise({"a": (1, 2, 3), "b": (True, False)})) == 6


def together(row) -> bool:
    """`a` and `b` must be equal where both are chosen."""
    return "a" not in row or "b" not in row or row["a"] == row["b"]


def test_every_pair_that_is_allowed_is_in_some_row():
    options = {"a": (1, 2, 3), "b": (1, 2, 3), "c": ("x", "y", "z")}
    rows = pairwise(options, together)
    assert all(map(together, rows))
    assert {(row["a"], row["b"]) for row in rows} == {(1, 1), (2, 2), (3, 3)}
    for first, second in (("a", "c"), ("b", "c")):
        assert {(row[first], row[second]) for row in rows} == set(product(options[first], options[second]))


def test_rows_are_filled_up_with_others_that_are_allowed():
    options = {"a": (1, 2, 3), "b": (1, 2, 3), "c": (1, 2, 3, 4), "d": (1, 2, 3, 4)}
    rows = pairwise(options, together)
    filled = filled_up(rows, options, len(rows) + 10, 3, together)
    assert filled[: len(rows)] == rows
    assert len({tuple(row.items()) for row in filled}) == len(rows) + 10 == len(filled)
    assert all(map(together, filled))
    assert filled == filled_up(rows, options, len(rows) + 10, 3, together)
    assert filled != filled_up(rows, options, len(rows) + 10, 4, together)
