"""What an option is: a field of `TrainingArguments` together with its documentation and its admissible values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

GROUPS = ("Model", "Data", "Training", "The life of a gradient", "Parallelism", "Running")

NO_EFFECT_ON_PROGRAM = "none"


@dataclass(frozen=True)
class Option:
    """One key of a configuration: its type, its default, its words, and the values it admits."""

    name: str
    type: Any
    """`bool`, `int`, `float`, `str`, `tuple` (of strings) or `dict`."""
    default: Any
    group: str
    help: str
    """What it means."""
    effect: str
    """What it does to the step's program."""
    cost: str
    """What it costs and buys."""
    choices: tuple[str, ...]
    spellings: Mapping[str, str]
    """Other tools' spellings of a choice, and the choice they mean."""
    aliases: tuple[str, ...]
    """Other names of the same key."""
    minimum: float | None
    maximum: float | None
    above: float | None
    """Exclusive lower bound."""
    below: float | None
    """Exclusive upper bound."""
    unset: Any
    """A value by which other tools say "not given": it stands for the default."""
    parse: Callable[[str, Any], Any] | None
    """Reads a value that is more than a plain scalar, list or mapping: `parse(name, value)`."""
    default_text: str | None
    """How the default reads when it depends on other keys."""
    is_path: bool
    """Names files or folders: `~` at its beginning is the user's home folder."""

    @property
    def type_name(self) -> str:
        names = {bool: "true|false", int: "integer", float: "number", str: "text", tuple: "list", dict: "mapping"}
        return "|".join(self.choices) if self.choices else names[self.type]

    @property
    def default_name(self) -> str:
        """The default as one would write it in YAML."""
        if self.default_text is not None:
            return self.default_text
        if isinstance(self.default, bool):
            return str(self.default).lower()
        if self.default is None or self.default in ((), ""):
            return "not set"
        return ", ".join(self.default) if isinstance(self.default, tuple) else str(self.default)


def option(
    group: str,
    default: Any,
    help: str,
    *,
    effect: str = NO_EFFECT_ON_PROGRAM,
    cost: str,
    choices: tuple[str, ...] = (),
    spellings: Mapping[str, str] | None = None,
    aliases: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    unset: Any = None,
    parse: Callable[[str, Any], Any] | None = None,
    default_text: str | None = None,
    is_path: bool = False,
) -> Any:
    """A dataclass field that carries the documentation and the admissible values of an option (see `Option`)."""
    words = {"group": group, "help": help, "effect": effect, "cost": cost, "default_text": default_text}
    names = {"choices": choices, "spellings": spellings or {}, "aliases": aliases}
    values = {
        "minimum": minimum,
        "maximum": maximum,
        "above": above,
        "below": below,
        "unset": unset,
        "parse": parse,
        "is_path": is_path,
    }
    return field(default=default, metadata={**words, **names, **values})


@cache
def options_of(arguments_class: type) -> dict[str, Option]:
    """The options of a dataclass by name, in the order of `GROUPS`."""
    hints = get_type_hints(arguments_class)
    found = [
        Option(name=each.name, type=_plain_type(hints[each.name]), default=each.default, **each.metadata)
        for each in fields(arguments_class)
        if each.metadata
    ]
    return {each.name: each for each in sorted(found, key=lambda each: GROUPS.index(each.group))}


def _plain_type(hint: Any) -> Any:
    """`int` of `int | None`, `tuple` of `tuple[str, ...]`, `dict` of `Mapping[str, Any]`."""
    origin = get_origin(hint)
    if origin is Mapping:
        return dict
    if origin is tuple or origin is None:
        return origin or hint
    return _plain_type(next(part for part in get_args(hint) if part is not type(None)))
