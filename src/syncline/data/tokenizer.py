"""Tokenizers: bytes, byte-level BPE trained on the documents themselves, and any Hugging Face tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from syncline.errors import UserError

BYTE_TOKENIZER = "byte"
TRAIN_BPE_PREFIX = "train-bpe:"
END_OF_DOCUMENT = "<|endoftext|>"

_SMALLEST_BPE = 256 + 1
_BPE_SAMPLE_BYTES = 2 * 2**20
_BPE_SAMPLE_BYTES_PER_TOKEN = 1024
_BPE_PIECE_CHARACTERS = 8 * 1024
_ENCODED_PIECE_CHARACTERS = 2**20
_ENCODED_BATCH_CHARACTERS = 4 * 2**20


def load_tokenizer(name: str, documents: Iterable[str]) -> PreTrainedTokenizerBase:
    """The tokenizer that `name` asks for; it has an end-of-sequence token, which ends every document.

    `byte`: 256 bytes (token id = byte) and an end-of-document token. `train-bpe:N`: byte-level BPE of N tokens in all,
    trained on an evenly spread part of `documents`, which is iterated more than once. Anything else: a tokenizer
    folder or hub name. Raises `UserError` for a name that means none of these.
    """
    if name == BYTE_TOKENIZER:
        return byte_tokenizer()
    if name.startswith(TRAIN_BPE_PREFIX):
        return train_bpe(_vocabulary_size(name), documents)
    return pretrained_tokenizer(name)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    return _wrap(_byte_level(models.BPE(vocab=vocabulary, merges=[]), split_command_line=False))


def train_bpe(vocabulary_size: int, documents: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of exactly `vocabulary_size` tokens, the end-of-document token among them.

    It is trained on at most max(2 MiB, 1 KiB per token) of `documents`, in pieces spread evenly over all of them.
    """
    if vocabulary_size < _SMALLEST_BPE:
        wrong = "the 256 bytes and the end-of-document token do not fit in it"
        raise UserError(f"{TRAIN_BPE_PREFIX}{vocabulary_size}", wrong, f"Write a size of at least {_SMALLEST_BPE}")
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer = _byte_level(models.BPE(), split_command_line=True)
    sample_bytes = max(_BPE_SAMPLE_BYTES, _BPE_SAMPLE_BYTES_PER_TOKEN * vocabulary_size)
    tokenizer.train_from_iterator(_evenly_spread_pieces(documents, sample_bytes), trainer)
    learned = tokenizer.get_vocab_size()
    if learned < vocabulary_size:
        wrong = f"the text has repeated pairs for only {learned} tokens"
        raise UserError(f"{TRAIN_BPE_PREFIX}{vocabulary_size}", wrong, f"Write train-bpe:{learned}, or give more text")
    return _wrap(tokenizer)


def pretrained_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer from a folder, or from the Hugging Face hub (or its local cache)."""
    instead = f"Name a tokenizer folder, a hub name, {BYTE_TOKENIZER!r} or {TRAIN_BPE_PREFIX}N"
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise UserError(f"the tokenizer {name!r}", "there is no such folder", instead)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # what a bad folder raises depends on the tokenizer: OSError, ValueError, bare Exception
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"the tokenizer {name!r}", f"it cannot be loaded: {reason[0].rstrip('.')}", instead) from error
    if tokenizer.eos_token_id is None:
        wrong = "it has no end-of-sequence token to put between documents"
        raise UserError(f"the tokenizer {name!r}", wrong, 'Set "eos_token" in its tokenizer_config.json')
    return tokenizer


def vocabulary_extent(tokenizer: PreTrainedTokenizerBase) -> int:
    """The largest token id plus one: the rows that an embedding needs."""
    return max(tokenizer.get_vocab().values()) + 1


def encode_documents(tokenizer: PreTrainedTokenizerBase, documents: Iterable[str]) -> Iterator[NDArray[np.int64]]:
    """The token ids of each document, in order: int64, one dimension.

    A document begins with the tokenizer's begin-of-sequence token where the tokenizer itself puts one, and ends with
    its end-of-sequence token. A document above a million characters is encoded in pieces that end at a line's end, so
    that memory stays bounded; no token spans two pieces.
    """
    head, tail = _begin_of_document(tokenizer), [tokenizer.eos_token_id]
    for batch in _batches(documents):
        pieces_of_documents = [list(_pieces(text, _ENCODED_PIECE_CHARACTERS)) for text in batch]
        pieces = list(chain.from_iterable(pieces_of_documents))
        encoded = iter(
            tokenizer(pieces, add_special_tokens=False, return_attention_mask=False, verbose=False).input_ids
        )
        for document in pieces_of_documents:
            yield np.concatenate([head, *islice(encoded, len(document)), tail]).astype(np.int64)


def _vocabulary_size(name: str) -> int:
    try:
        return int(name.removeprefix(TRAIN_BPE_PREFIX))
    except ValueError as error:
        instead = f"Write the number of tokens, as in {TRAIN_BPE_PREFIX}8192"
        raise UserError(f"the tokenizer {name!r}", "the vocabulary size is not a whole number", instead) from error


def _byte_level(model: models.Model, split_command_line: bool) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split_command_line)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=None,
        eos_token=END_OF_DOCUMENT,
        pad_token=END_OF_DOCUMENT,
        clean_up_tokenization_spaces=False,
    )


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies.

    Printable Latin-1 characters stand for themselves, the other bytes for the characters from U+0100 on (Radford et
    al., "Language Models are Unsupervised Multitask Learners", 2019).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _begin_of_document(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    begins = tokenizer.bos_token_id is not None and tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]
    return [tokenizer.bos_token_id] if begins else []


def _evenly_spread_pieces(documents: Iterable[str], limit_bytes: int) -> Iterator[str]:
    """At most about `limit_bytes` of the text: every n-th piece, for the smallest sufficient n."""
    assert iter(documents) is not documents, "the documents are read twice"
    total_bytes = sum(len(text.encode()) for text in documents)
    stride = -(-total_bytes // limit_bytes)
    pieces = (piece for text in documents for piece in _pieces(text, _BPE_PIECE_CHARACTERS))
    return (piece for number, piece in enumerate(pieces) if number % stride == 0)


def _pieces(text: str, longest: int) -> Iterator[str]:
    """`text` in pieces of at most `longest` characters that end after a line's end where there is one."""
    start = 0
    while len(text) - start > longest:
        line_end = text.rfind("\n", start, start + longest)
        end = line_end + 1 if line_end >= 0 else start + longest
        yield text[start:end]
        start = end
    yield text[start:]


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in documents:
        batch.append(text)
        characters += len(text)
        if characters >= _ENCODED_BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
