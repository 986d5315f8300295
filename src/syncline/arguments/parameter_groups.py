"""How `parameter_groups` is read: a list of mappings, each of which has a pattern and what is particular about it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from syncline.arguments.nearest import nearest
from syncline.arguments.option import option, options_of
from syncline.arguments.values import read_value
from syncline.errors import UserError

_option = partial(option, "Training", cost="Free.")


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """One entry of `parameter_groups`. What is None follows the run's own settings."""

    pattern: str = _option("", "A regular expression, searched in parameter names.")
    learning_rate: float | None = _option(
        None, "The peak of its learning rate.", minimum=0, default_text="the run's own"
    )
    weight_decay: float | None = _option(
        None, "Decay of all that the pattern finds.", minimum=0, default_text="the run's own, of matrices only"
    )


def parse_parameter_groups(name: str, value: Any) -> tuple[dict[str, Any], ...]:
    """The entries in the option `name`, in their order, each with its pattern and the settings that were given.

    Raises `UserError` for what is no list of mappings, for an unknown key and a wrong value, and where a pattern is
    missing or no regular expression.
    """
    if not isinstance(value, (list, tuple)) or not all(isinstance(entry, dict) for entry in value):
        raise UserError(
            f"{name}={value}",
            "must be a list of mappings",
            f"Write {name}: [{{pattern: embed_tokens, weight_decay: 0.0}}].",
        )
    return tuple(_read_group(f"entry {number} of {name}", entry) for number, entry in enumerate(value, start=1))


def _read_group(place: str, entry: dict[Any, Any]) -> dict[str, Any]:
    options = options_of(ParameterGroup)
    for key in entry:
        if key not in options:
            raise UserError(f"{key} in {place}", "no such key", f"The nearest is {nearest(str(key), options)}.")
    try:
        given = {key: read_value(options[key], entry[key]) for key in options if entry.get(key) is not None}
    except UserError as error:
        raise UserError(f"{place}, {error.given}", error.wrong, error.instead) from None
    if not given.get("pattern"):
        raise UserError(place, "has no pattern", "Add one to the entry, for example pattern: embed_tokens.")
    try:
        re.compile(given["pattern"])
    except re.error as error:
        raise UserError(
            f"{place}, pattern={given['pattern']}",
            f"not a regular expression ({error})",
            r"Write a pattern such as `embed_tokens` or `layers\.[01]\.`.",
        ) from None
    return given
