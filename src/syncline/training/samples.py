"""From the arguments to datasets, checked against the model that is to read them."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import PretrainedConfig

from syncline.arguments import TrainingArguments
from syncline.data.prepare import PreparedData, prepare_data
from syncline.errors import UserError


def prepare_samples(arguments: TrainingArguments, config: PretrainedConfig) -> PreparedData:
    """Read, tokenize and pack what the arguments name, or open what an earlier run has prepared.

    Raises:
        UserError: when the data cannot be read, or the model cannot read it.
    """
    if not arguments.train_data:
        raise UserError("train_data", "it is not given", "Name files, a folder, python-stdlib or random-tokens")
    text_config = config.get_text_config()
    vocabulary = int(text_config.vocab_size)
    prepared = prepare_data(
        train_data=arguments.train_data,
        validation_data=arguments.validation_data or None,
        validation_split=0.0 if arguments.validation_data else arguments.validation_split,
        text_field=arguments.text_field,
        tokenizer_name=arguments.tokenizer_name_or_path,
        max_seq_length=arguments.max_seq_length,
        isolate_documents=arguments.isolate_documents,
        seed=arguments.seed,
        cache_folder=cache_folder(arguments),
        vocabulary_size=vocabulary,
        random_token_samples=arguments.random_token_samples,
        limit_bytes=arguments.max_data_bytes,
    )
    if prepared.vocabulary_size > vocabulary:
        raise UserError(
            f"tokenizer_name_or_path {arguments.tokenizer_name_or_path}",
            f"its tokens go up to {prepared.vocabulary_size - 1}, the model's vocabulary has {vocabulary}",
            f"Write model_config.vocab_size: {prepared.vocabulary_size}, or the model's own tokenizer",
        )
    positions = getattr(text_config, "max_position_embeddings", None)
    if positions is not None and arguments.max_seq_length > positions:
        raise UserError(
            f"max_seq_length {arguments.max_seq_length}",
            f"the model knows {positions} positions (max_position_embeddings)",
            f"Write max_seq_length: {positions} or less",
        )
    return prepared


def cache_folder(arguments: TrainingArguments) -> Path:
    """Where prepared data is kept: as told, or below the user's cache folder."""
    if arguments.data_cache_folder is not None:
        return Path(arguments.data_cache_folder)
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "syncline" / "data"
