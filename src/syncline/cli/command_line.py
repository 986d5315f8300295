"""A command's argv: its own options, the config file, and the keys that override it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from syncline.errors import UserError


@dataclass(frozen=True)
class CommandLine:
    """What was typed after the command's name."""

    config: str | None
    options: Mapping[str, str]
    """The command's own options that were given; a switch has the value `true`."""
    overrides: tuple[str, ...]
    """Everything else, for `load_arguments`."""


def split_command_line(argv: Sequence[str], *, switches: Sequence[str] = (), valued: Sequence[str] = ()) -> CommandLine:
    """Tell a command's own options from keys.

    Raises:
        UserError: for an option without its value.
    """
    rest = list(argv)
    config = rest.pop(0) if rest and not rest[0].startswith("-") else None
    options: dict[str, str] = {}
    overrides: list[str] = []
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name in switches:
            options[name] = "true"
        elif word.startswith("--") and name in valued:
            if not equals and (not rest or rest[0].startswith("--")):
                raise UserError(f"--{name}", "its value is missing", f"Write --{name} VALUE")
            options[name] = value if equals else rest.pop(0)
        else:
            overrides.append(word)
    return CommandLine(config, options, tuple(overrides))


def require_config(command_line: CommandLine, command: str) -> str:
    if command_line.config is None:
        raise UserError(f"syncline {command}", "no CONFIG is given", f"Write syncline {command} CONFIG.yaml")
    return command_line.config
