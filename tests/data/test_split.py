"""The validation split: by document, or the end of a single one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.data.split import split_documents
from syncline.errors import UserError

TEXTS = [f"document {number}" for number in range(100)]


@given(st.lists(st.text(), min_size=2, unique=True), st.floats(0.001, 0.999), st.integers(0, 9))
def test_both_sides_have_documents_and_together_all(texts, share, seed):
    split = split_documents(texts, share, seed)
    train, validation = list(split.train(texts)), list(split.validation(texts))
    assert train
    assert validation
    assert sorted(train + validation) == sorted(texts)


def test_the_share_is_exact_and_seeded():
    first, second = (split_documents(TEXTS, 0.2, seed) for seed in (0, 1))
    assert len(list(first.validation(TEXTS))) == 20
    assert list(first.validation(TEXTS)) != list(second.validation(TEXTS))
    assert first == split_documents(TEXTS, 0.2, 0)


def test_order_does_not_matter():
    assert split_documents(TEXTS, 0.2, 0) == split_documents(TEXTS[::-1], 0.2, 0)


def test_copies_stay_on_one_side():
    texts = TEXTS * 3
    split = split_documents(texts, 0.1, 0)
    assert not set(split.train(texts)) & set(split.validation(texts))


def both_sides(texts: list[str], share: float) -> tuple[list[str], list[str]]:
    split = split_documents(texts, share, 0)
    return list(split.train(texts)), list(split.validation(texts))


@given(st.text(min_size=2), st.floats(0.001, 0.999))
def test_of_a_single_document_the_end_is_held_out(text, share):
    ((head,), (tail,)) = both_sides([text], share)
    assert head
    assert tail
    assert head + tail == text
    assert abs(len(tail) - share * len(text)) <= max(1, len(text) / 10 + 0.5)


def test_the_end_begins_with_a_line_where_one_is_near():
    lines = [f"line {number:03d}\n" for number in range(100)]
    assert both_sides(["".join(lines)], 0.1) == (["".join(lines[:90])], ["".join(lines[90:])])
    assert both_sides(["".join(lines)], 0.104) == (["".join(lines[:90])], ["".join(lines[90:])])
    assert both_sides(["".join(lines)], 0.106) == (["".join(lines[:89])], ["".join(lines[89:])])


def test_a_line_end_that_is_far_away_moves_nothing():
    assert both_sides(["short\n" + "a" * 94], 0.2) == (["short\n" + "a" * 74], ["a" * 20])


def test_copies_of_one_document_are_cut_alike():
    assert both_sides(["head\ntail\n"] * 3, 0.5) == (["head\n"] * 3, ["tail\n"] * 3)


@pytest.mark.parametrize("texts", [["a"], ["a", "a", "a"]])
def test_a_single_character_cannot_be_shared_out(texts):
    with pytest.raises(UserError, match="Write validation_split: 0"):
        split_documents(texts, 0.5, 0)
