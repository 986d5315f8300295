"""From a configuration file and a command line to `TrainingArguments`, and back to a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any

from syncline.arguments.foreign import MEANINGLESS, REFUSALS, TRANSLATIONS
from syncline.arguments.nearest import nearest
from syncline.arguments.option import GROUPS
from syncline.arguments.serialization import MalformedText, read_json, read_yaml, write_yaml
from syncline.arguments.training_arguments import OPTIONS, TrainingArguments
from syncline.arguments.values import read_value
from syncline.errors import UserError


def load_arguments(config_path: str | PathLike[str] | None, overrides: Sequence[str] = ()) -> TrainingArguments:
    """The arguments of a YAML or JSON file of flat keys (none: the defaults), overridden by a command line.

    `overrides` are `--key value`, `--key=value` or, for a boolean, `--key`; `--model_config.hidden_size 64` overrides
    one entry of a mapping, and a list may be given as several values. Keys of Hugging Face's and PaddleNLP's training
    arguments are understood (see `syncline.arguments.foreign`). Raises `UserError` for whatever is wrong, and when no
    model is named.
    """
    configured = read_config(config_path) if config_path is not None else {}
    arguments = arguments_from_mapping(configured, read_overrides(overrides))
    if not arguments.model_name_or_path and arguments.model_config is None:
        raise UserError(
            str(config_path or "the command line"),
            "names no model",
            "Write model_name_or_path: FOLDER_OR_HUB_NAME, or model_config: {model_type: llama, ...}.",
        )
    return arguments


def arguments_from_mapping(*sources: Mapping[str, Any]) -> TrainingArguments:
    """The arguments of flat mappings, of which later ones win. `None` stands for a key's default.

    A key that a later mapping repeats is not read in an earlier one: one spelling may stand for several options.
    """
    merged: dict[str, Any] = {}
    notices: list[str] = []
    for position, source in enumerate(sources):
        later = {key for each in sources[position + 1 :] for key in each}
        own = _own_keys({key: value for key, value in source.items() if key not in later})
        notices += own.notices
        merged.update(own.values)
        for (key, entry), value in own.entries.items():
            merged[key] = _with_entry(read_value(OPTIONS[key], merged.get(key)) or {}, entry, value)
    return TrainingArguments(**merged, notices=tuple(dict.fromkeys(notices)))


def resolved_yaml(arguments: TrainingArguments) -> str:
    """Every option with its value, group by group; loads back to equal arguments."""
    parts = []
    for group in GROUPS:
        values = {name: getattr(arguments, name) for name, option in OPTIONS.items() if option.group == group}
        parts.append(f"# {group}\n{write_yaml(values)}")
    return "\n".join(parts)


def read_config(path: str | PathLike[str]) -> dict[str, Any]:
    """The mapping in a YAML or JSON file, as it is written. Raises `UserError`."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(str(path), f"cannot be read ({reason})", "Give the path of a YAML or JSON file.") from None
    try:
        content = read_json(text) if fspath(path).endswith(".json") else read_yaml(text)
    except MalformedText as error:
        raise UserError(
            str(path), f"cannot be parsed ({error})", "Write one `key: value` a line, each key once."
        ) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(str(path), "does not hold keys", "Write one `key: value` a line.")
    return {str(key): value for key, value in content.items()}


def read_overrides(words: Sequence[str]) -> dict[str, Any]:
    """The mapping that a command line's `--key value` words say. Raises `UserError`."""
    given: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word[2:].partition("=")
            if key in given:
                raise UserError(f"--{key}", "given twice", "Keep one of the two.")
            given[key] = [value] if equals else []
        elif given:
            given[next(reversed(given))].append(word)
        else:
            raise UserError(word, "belongs to no key", "Write --key value.")
    return {key: _read_words(key, values) for key, values in given.items()}


def _read_words(key: str, words: list[str]) -> Any:
    option = OPTIONS.get(_name(key))
    if option is None:  # an entry of a mapping, or a foreign key
        return _yaml_value(key, " ".join(words)) if words else True
    if not words:
        if option.type is bool:
            return True
        raise UserError(f"--{key}", "has no value", f"Write --{key} VALUE.")
    if option.type is tuple and len(words) > 1:
        return words
    text = words[0]
    if len(words) > 1:
        raise UserError(f"--{key} {' '.join(words)}", "has more than one value", f"Write --{key} VALUE.")
    if text == "null":
        return None
    if option.type is dict or (option.type is tuple and text.startswith("[")):
        return _yaml_value(key, text)
    return text


def _yaml_value(key: str, text: str) -> Any:
    try:
        return read_yaml(text)
    except MalformedText as error:
        raise UserError(f"--{key} {text}", f"cannot be parsed ({error})", "Write a YAML value.") from None


@dataclass
class _OwnKeys:
    """What a source says in Syncline's own keys."""

    values: dict[str, Any] = field(default_factory=dict)
    entries: dict[tuple[str, str], Any] = field(default_factory=dict)
    """Single entries of a mapping: (key, dotted path) -> value."""
    notices: list[str] = field(default_factory=list)
    spelling: dict[str, str] = field(default_factory=dict)
    """How each of `values` was spelled in the source."""

    def say(self, key: str, spelling: str, value: Any) -> None:
        if key in self.values and self.values[key] != value:
            given = f"{self.spelling[key]} and {spelling}"
            raise UserError(given, f"both decide {key}, differently", "Keep one of the two.")
        self.values[key], self.spelling[key] = value, spelling


def _own_keys(source: Mapping[str, Any]) -> _OwnKeys:
    own = _OwnKeys()
    for key, value in source.items():
        mapping, dot, entry = key.partition(".")
        if key in TRANSLATIONS and value is not None:
            for translated, meant in TRANSLATIONS[key].keys(key, value).items():
                own.say(translated, key, meant)
        elif _name(key) in OPTIONS:
            own.say(_name(key), key, value)
        elif dot and mapping in OPTIONS and OPTIONS[mapping].type is dict:
            own.entries[mapping, entry] = value
        elif key in REFUSALS:
            if value not in REFUSALS[key].neutral:
                raise UserError(f"{key}={value}", REFUSALS[key].wrong, REFUSALS[key].instead)
        elif key in MEANINGLESS:
            own.notices.append(f"{key} means nothing here: {MEANINGLESS[key]}.")
        elif key not in TRANSLATIONS:
            raise UserError(key, "no such key", f"The nearest is {nearest(key, _KNOWN)}.")
    return own


def _name(key: str) -> str:
    return _NAME_OF.get(key, key)


def _with_entry(mapping: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """`mapping` with the entry at a dotted path replaced."""
    entry, dot, rest = path.partition(".")
    if not dot:
        return {**mapping, entry: value}
    inner = mapping.get(entry)
    return {**mapping, entry: _with_entry(inner if isinstance(inner, dict) else {}, rest, value)}


_NAME_OF = {alias: name for name, option in OPTIONS.items() for alias in option.aliases}
_KNOWN = (*OPTIONS, *_NAME_OF, *TRANSLATIONS)
