"""The validation split by document."""

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


@pytest.mark.parametrize("texts", [["one"], ["same", "same", "same"]])
def test_nothing_to_share_out(texts):
    with pytest.raises(UserError, match=f"{len(texts)} document"):
        split_documents(texts, 0.5, 0)
