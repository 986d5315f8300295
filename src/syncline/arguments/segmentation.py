"""The values of `pp_seg_method`: how layers are divided among pipeline stages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from syncline.errors import UserError

UNIFORM = "uniform"
LAYER = "layer:"

Segmentation = tuple[str, ...]
"""`("uniform",)`, `("layer:PATTERN",)`, or a number of layers for each stage."""


def parse_segmentation(name: str, value: Any) -> Segmentation:
    """`uniform`, `layer:PATTERN`, or numbers of layers as a list or separated by commas.

    Raises `UserError` for anything else, for a pattern that is no regular expression, and for stages without a layer.
    """
    if isinstance(value, str) and value.startswith(LAYER):
        return (_checked_pattern(name, value),)
    words = [str(word).strip() for word in (value if isinstance(value, (list, tuple)) else str(value).split(","))]
    if words in ([UNIFORM], [""], []):
        return (UNIFORM,)
    if len(words) == 1 and words[0].startswith(LAYER):
        return (_checked_pattern(name, words[0]),)
    if all(word.isdecimal() and int(word) > 0 for word in words):
        return tuple(words)
    raise UserError(
        f"{name}={','.join(words)}",
        "it is neither a word for a way to divide layers nor a number of layers, at least 1, for each stage",
        f"Write {UNIFORM}, {LAYER}PATTERN with a pattern that finds the class of the layers to count, or 8,8,8,6.",
    )


def listed_layers(segmentation: Sequence[str]) -> tuple[int, ...] | None:
    """The number of layers of each stage, where they are listed."""
    return tuple(map(int, segmentation)) if segmentation[0].isdecimal() else None


def pattern(segmentation: Sequence[str]) -> str | None:
    """The pattern that finds the class of the layers to count, where there is one."""
    return segmentation[0].removeprefix(LAYER) if segmentation[0].startswith(LAYER) else None


def _checked_pattern(name: str, value: str) -> str:
    try:
        re.compile(value.removeprefix(LAYER))
    except re.error as error:
        raise UserError(
            f"{name}={value}", f"the pattern is no regular expression: {error}", f"Write {LAYER}DecoderLayer."
        ) from error
    if value == LAYER:
        raise UserError(f"{name}={value}", "the pattern is empty", f"Write {LAYER}DecoderLayer, or {UNIFORM}.")
    return value
