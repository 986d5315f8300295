"""From what a configuration file or a command line holds to the value of an option, or a clear error."""

from __future__ import annotations

import math
import os.path
from typing import Any

from syncline.arguments.nearest import nearest
from syncline.arguments.option import Option
from syncline.errors import UserError

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def read_value(option: Option, value: Any) -> Any:
    """`value` as the option's type, checked against what the option admits. Raises `UserError`.

    `None` and the option's `unset` value stand for the default. Numbers and booleans may be given as text. A path's
    leading `~` becomes the user's home folder; a hub name never begins with it and stays.
    """
    if value is None:
        return option.default
    if option.parse:
        return option.parse(option.name, value)
    read = _READERS[option.type](option, value)
    if option.unset is not None and read == option.unset:
        return option.default
    return _with_home(read) if option.is_path else read


def read_boolean(name: str, value: Any) -> bool:
    """`value` as a boolean: true and false, yes and no, on and off, 1 and 0."""
    text = str(value).lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise UserError(f"{name}={value}", "must be true or false", f"Write {name}: true or {name}: false.")


def _with_home(read: Any) -> Any:
    return tuple(map(os.path.expanduser, read)) if isinstance(read, tuple) else os.path.expanduser(read)


def _read_integer(option: Option, value: Any) -> int:
    number = _number(option, value, "a whole number")
    if number != int(number):
        raise _wrong_number(option, value, "a whole number")
    return int(_within_bounds(option, value, number))


def _read_float(option: Option, value: Any) -> float:
    return float(_within_bounds(option, value, _number(option, value, "a number")))


def _number(option: Option, value: Any, kind: str) -> float | int:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise _wrong_number(option, value, kind)
    if isinstance(value, int):
        return value
    try:
        number = float(value)
    except ValueError:
        raise _wrong_number(option, value, kind) from None
    if not math.isfinite(number):
        raise _wrong_number(option, value, kind)
    return int(value) if isinstance(value, str) and value.strip().lstrip("+-").isdigit() else number


def _wrong_number(option: Option, value: Any, kind: str) -> UserError:
    example = option.default if option.default is not None else int(option.minimum or 1)
    return UserError(f"{option.name}={value}", f"must be {kind}", f"Write for example {option.name}: {example}.")


def _within_bounds(option: Option, value: Any, number: float) -> float:
    if option.unset is not None and number == option.unset:
        return number
    bounds = [
        (option.minimum, "at least", lambda bound: number >= bound),
        (option.above, "greater than", lambda bound: number > bound),
        (option.maximum, "at most", lambda bound: number <= bound),
        (option.below, "less than", lambda bound: number < bound),
    ]
    given = [(bound, words, holds) for bound, words, holds in bounds if bound is not None]
    if all(holds(bound) for bound, _, holds in given):
        return number
    range_text = " and ".join(f"{words} {bound}" for bound, words, _ in given)
    unset = f", or {option.unset} for the default" if option.unset is not None else ""
    raise UserError(
        f"{option.name}={value}", f"must be {range_text}", f"Write a value {range_text}{unset} ({option.default_name})."
    )


def _read_text(option: Option, value: Any) -> str:
    if option.choices:
        return _read_choice(option, value)
    if not isinstance(value, str):
        raise UserError(f"{option.name}={value}", "must be text", f'Write it in quotes: {option.name}: "{value}".')
    return value


def _read_choice(option: Option, value: Any) -> str:
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    text = "no" if value is False else str(value)  # YAML reads a plain `no` as false
    text = option.spellings.get(text, text)
    if text in option.choices:
        return text
    raise UserError(
        f"{option.name}={value}",
        f"must be one of {', '.join(option.choices)}",
        f"The nearest is {nearest(text, option.choices)}.",
    )


def _read_list(option: Option, value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
        raise UserError(
            f"{option.name}={value}", "must be text or a list of texts", f'Write {option.name}: ["...", "..."].'
        )
    return tuple(items)


def _read_mapping(option: Option, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UserError(
            f"{option.name}={value}", "must be a mapping", f"Write its entries indented below {option.name}:."
        )
    return dict(value)


_READERS: dict[type, Any] = {
    bool: lambda option, value: read_boolean(option.name, value),
    int: _read_integer,
    float: _read_float,
    str: _read_text,
    tuple: _read_list,
    dict: _read_mapping,
}
