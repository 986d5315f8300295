from itertools import combinations, product

from tests.verification.configurations import OPTIONS, covering_choices
from tests.verification.covering import pairwise


def test_every_pair_of_values_is_in_some_row():
    rows = covering_choices()
    for first, second in combinations(OPTIONS, 2):
        assert {(row[first], row[second]) for row in rows} == set(product(OPTIONS[first], OPTIONS[second]))


def test_rows_are_few_and_always_the_same():
    rows = covering_choices()
    assert rows == covering_choices()
    assert len(rows) < 60


def test_two_options_need_their_product():
    assert len(pairwise({"a": (1, 2, 3), "b": (True, False)})) == 6
