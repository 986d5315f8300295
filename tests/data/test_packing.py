"""Packing loses no token, and isolation keeps documents apart."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from syncline.data.batch import IGNORED_LABEL
from syncline.data.packing import PackedDataset, write_packed

END = 99
DOCUMENTS = st.lists(st.lists(st.integers(0, 98), max_size=12), min_size=1, max_size=8)


def packed(documents: list[list[int]], max_seq_length: int, isolate_documents: bool = False) -> PackedDataset:
    ended = [[*document, END] for document in documents]
    tokens = np.array([token for document in ended for token in document], dtype=np.uint16)
    starts = np.cumsum([0, *(len(document) for document in ended[:-1])])
    return PackedDataset(tokens, starts, max_seq_length, isolate_documents)


def samples(dataset: PackedDataset) -> list[tuple[list[int], list[int], list[int]]]:
    return [tuple(array.tolist() for array in dataset[index]) for index in range(len(dataset))]


def test_samples_of_a_small_stream():
    assert samples(packed([[1, 2, 3], [4]], 4)) == [
        ([1, 2, 3, END], [2, 3, END, 4], [0, 1, 2, 3]),
        ([4, END, END, END], [END, IGNORED_LABEL, IGNORED_LABEL, IGNORED_LABEL], [0, 1, 2, 3]),
    ]


def test_isolated_samples_of_a_small_stream():
    assert samples(packed([[1, 2, 3], [4], [5, 6]], 6, isolate_documents=True)) == [
        ([1, 2, 3, END, 4, END], [2, 3, END, IGNORED_LABEL, END, IGNORED_LABEL], [0, 1, 2, 3, 0, 1]),
        ([5, 6, END, END, END, END], [6, END, *[IGNORED_LABEL] * 4], [0, 1, 2, 3, 4, 5]),
    ]


@given(DOCUMENTS, st.integers(1, 10))
def test_every_token_but_the_first_is_predicted_exactly_once(documents, max_seq_length):
    dataset = packed(documents, max_seq_length)
    pairs = [
        (token, label)
        for inputs, labels, _ in samples(dataset)
        for token, label in zip(inputs, labels, strict=True)
        if label != IGNORED_LABEL
    ]
    stream = dataset.tokens.tolist()
    assert pairs == list(pairwise(stream))


@given(DOCUMENTS, st.integers(1, 10))
def test_isolation_masks_each_documents_first_token_and_restarts_its_positions(documents, max_seq_length):
    dataset, plain = packed(documents, max_seq_length, isolate_documents=True), packed(documents, max_seq_length)
    starts = set(dataset.document_starts.tolist())
    for index in range(len(dataset)):
        isolated, sample = dataset[index], plain[index]
        assert isolated.input_ids.tolist() == sample.input_ids.tolist()
        position = -1
        for place in range(max_seq_length):
            global_place = index * max_seq_length + place
            position = 0 if global_place in starts else position + 1
            label = IGNORED_LABEL if global_place + 1 in starts else sample.labels[place]
            assert (isolated.position_ids[place], isolated.labels[place]) == (position, label)


@given(DOCUMENTS, st.integers(1, 10), st.booleans())
def test_samples_have_one_shape_and_type(documents, max_seq_length, isolate_documents):
    dataset = packed(documents, max_seq_length, isolate_documents)
    for index in range(len(dataset)):
        assert {(array.shape, array.dtype) for array in dataset[index]} == {((max_seq_length,), np.dtype(np.int64))}


def test_index_out_of_range():
    dataset = packed([[1, 2, 3]], 2)
    for index in (-1, len(dataset)):
        with pytest.raises(IndexError):
            dataset[index]


@pytest.mark.parametrize(("vocabulary_size", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_written_stream_is_mapped_back(tmp_path, vocabulary_size, dtype):
    generator = np.random.default_rng(0)
    documents = [generator.integers(vocabulary_size, size=size) for size in (5, 1, 1000)]
    write_packed(tmp_path, iter(documents), vocabulary_size)
    dataset = PackedDataset.open(tmp_path, 10, isolate_documents=False)
    assert isinstance(dataset.tokens, np.memmap)
    assert dataset.tokens.dtype == dtype
    assert dataset.tokens.tolist() == np.concatenate(documents).tolist()
    assert dataset.document_starts.tolist() == [0, 5, 6]
    assert dataset.token_count == 1006


def test_a_model_sees_nothing_of_the_document_before():
    """Positions that restart are all a transformers model needs to keep attention inside a document."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config).eval()

    def second_document(first: list[int], isolate_documents: bool) -> torch.Tensor:
        sample = packed([first, [10, 11, 12, 13]], 10, isolate_documents)[0]
        inputs, positions = torch.from_numpy(sample.input_ids)[None], torch.from_numpy(sample.position_ids)[None]
        with torch.no_grad():
            return model(input_ids=inputs, position_ids=positions, use_cache=False).logits[0, 5:9]

    alone = model(input_ids=torch.tensor([[10, 11, 12, 13]]), use_cache=False).logits[0]
    isolated = second_document([1, 2, 3, 4], isolate_documents=True)
    torch.testing.assert_close(isolated, alone, rtol=1e-5, atol=1e-6)
    assert torch.equal(isolated, second_document([5, 6, 7, 8], isolate_documents=True))
    reaching = second_document([1, 2, 3, 4], False) - second_document([5, 6, 7, 8], False)
    assert reaching.abs().max() > 1e-4
