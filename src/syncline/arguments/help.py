"""The text of `--help`: every option, group by group, and every flag."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from syncline.arguments.flags import FLAGS
from syncline.arguments.option import GROUPS, NO_EFFECT_ON_PROGRAM, Option
from syncline.arguments.training_arguments import OPTIONS

_WIDTH = 100


def help_text(groups: Iterable[str] = GROUPS) -> str:
    """Every option of `groups` with its default, meaning, effect on the step's program, and cost; then the flags."""
    wanted = tuple(groups)
    lines: list[str] = []
    for group in wanted:
        lines += [f"{group}:"]
        for option in OPTIONS.values():
            if option.group == group:
                lines += _option_lines(option)
        lines += [""]
    if "The life of a gradient" in wanted:
        lines += ["Flags of the *_parallel_config options:", *_flag_lines()]
    return "\n".join(lines).rstrip() + "\n"


def _option_lines(option: Option) -> Iterator[str]:
    yield f"  --{option.name} {option.type_name}  (default: {option.default_name})"
    yield from _wrapped(option.help)
    if option.effect != NO_EFFECT_ON_PROGRAM:
        yield from _wrapped(f"Program: {option.effect}.")
    yield from _wrapped(f"Cost: {option.cost}")
    if option.aliases:
        yield from _wrapped(f"Also: {', '.join(option.aliases)}")


def _flag_lines() -> Iterator[str]:
    for flag in FLAGS:
        yield f"  {flag.name}  ({', '.join(flag.configs)}; {flag.status_text})"
        yield from _wrapped(flag.meaning)


def _wrapped(text: str) -> list[str]:
    import textwrap  # here, so that reading arguments does not wait for it

    return textwrap.wrap(text, _WIDTH, initial_indent="      ", subsequent_indent="      ")
