"""The options that say what a model is trained on, and how text becomes samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from syncline.arguments.option import option

_option = partial(option, "Data")


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class DataArguments:
    """Which text, and how it becomes samples."""

    train_data: tuple[str, ...] = _option(
        (),
        "Text files, JSONL files, folders or globs; `python-stdlib`, the source of the running Python's standard "
        "library; or `random-tokens`, synthetic samples.",
        cost="Text is tokenized once and kept in data_cache_folder.",
        aliases=("input_dir", "train_file"),
        is_path=True,
    )
    validation_data: tuple[str, ...] = _option(
        (),
        "Like train_data, for evaluation. Without it a share of the training text is held out (validation_split).",
        cost="No training text is held out.",
        aliases=("validation_file",),
        is_path=True,
    )
    validation_split: float = _option(
        0.02,
        "The share of the training documents that is held out for evaluation when validation_data is not given; of a "
        "single document, its end. 0 holds out nothing: then there is no evaluation.",
        cost="That share of the text is not trained on.",
        minimum=0,
        below=1,
    )
    text_field: str = _option(
        "text",
        "The field of a JSONL line that holds its text.",
        cost="Free.",
        aliases=("text_column",),
    )
    max_seq_length: int = _option(
        1024,
        "Tokens per sample: documents are packed into sequences of this length.",
        effect="the size of the activations that stages send each other",
        cost="Activation memory grows with it, attention compute with its square.",
        minimum=1,
        aliases=("block_size", "max_seq_len"),
    )
    isolate_documents: bool = _option(
        False,
        "Packed documents do not attend to each other and their positions start at 0.",
        cost="transformers builds a block-diagonal mask from the positions, which rules out the fast causal kernel of "
        "`sdpa`.",
    )
    data_cache_folder: str | None = _option(
        None,
        "Where tokenized data is kept between runs.",
        cost="Disk space of a few bytes per token; a second run starts at once.",
        aliases=("data_cache",),
        default_text="the user's cache folder",
        is_path=True,
    )
    max_data_bytes: int | None = _option(
        None,
        "Read at most this many bytes of text from each of train_data and validation_data.",
        cost="Less text, and a quicker start.",
        minimum=1,
        default_text="all",
    )
    random_token_samples: int = _option(
        1024,
        "How many samples `random-tokens` makes.",
        cost="Nothing is read; nothing can be learnt from it but their repetition.",
        minimum=1,
    )
    shuffle: bool = _option(
        True,
        "Samples are drawn in an order that depends on the seed and the epoch, and on no degree of parallelism.",
        cost="Without it, neighbouring documents stand in the same batch.",
    )
