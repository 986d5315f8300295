"""YAML and JSON as configurations use them: `1e-4` is a number, and a key stands once.

PyYAML is imported on first use: the command line answers `--help` without it.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

_NUMBER_WITH_EXPONENT = re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")


class MalformedText(ValueError):
    """A text that is not YAML or JSON, or has a key twice; the message says where."""


def read_yaml(text: str) -> Any:
    """The value of a YAML document. Raises `MalformedText`."""
    import yaml

    try:
        return yaml.load(text, Loader=_loader_and_dumper()[0])
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise MalformedText(where + str(getattr(error, "problem", error))) from None


def write_yaml(value: Any) -> str:
    """`value` as block YAML, keys in their order; `read_yaml` reads an equal value back."""
    import yaml

    return yaml.dump(value, Dumper=_loader_and_dumper()[1], sort_keys=False, allow_unicode=True, width=100)


def read_json(text: str) -> Any:
    """The value of a JSON document. Raises `MalformedText`."""
    import json

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise MalformedText(f"{name} stands twice")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise MalformedText(f"line {error.lineno}: {error.msg}") from None


def _represent_text(dumper: Any, text: str) -> Any:
    """Quotes text with Unicode line breaks, which a plain or single-quoted scalar would lose."""
    style = '"' if any(character in text for character in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


@lru_cache(maxsize=1)
def _loader_and_dumper() -> tuple[Any, Any]:
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if key.value in seen:
                    raise MalformedText(f"line {key.start_mark.line + 1}: {key.value} stands twice")
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    for resolver in (Loader, Dumper):
        # Both, so that text which looks like such a number is written in quotes.
        resolver.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER_WITH_EXPONENT, list("-+.0123456789"))
    Dumper.add_representer(str, _represent_text)
    Dumper.add_representer(tuple, lambda dumper, value: dumper.represent_list(value))
    return Loader, Dumper
