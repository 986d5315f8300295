"""`syncline program`: one optimizer step as text, JSON or a page; and what an option moves in it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from syncline.arguments import OPTIONS, TrainingArguments, load_arguments, resolved_yaml
from syncline.arguments.flags import CONFIGS, FLAGS
from syncline.arguments.nearest import nearest
from syncline.cli.command_line import require_config, split_command_line
from syncline.errors import UserError
from syncline.program.program import Program


def program(argv: Sequence[str]) -> int:
    """Run the command with the words after `program`; returns the exit status."""
    split = split_command_line(argv, switches=("json",), valued=("rank", "html", "without"))
    arguments = load_arguments(require_config(split, "program"), split.overrides)
    from syncline.program.display.compare import compare
    from syncline.program.display.text import to_json, to_text
    from syncline.training.job import describe_job

    job = describe_job(arguments)
    for warning in job.strategy.warnings:
        print(f"syncline: warning: {warning}", file=sys.stderr)
    for note in job.notes:
        print(f"syncline: {note}", file=sys.stderr)
    ranks = [_rank(split.options["rank"], job.program.topology.world_size)] if "rank" in split.options else None
    if "without" in split.options:
        if "html" in split.options:
            raise UserError("--without and --html", "a page shows one program", "Leave one of the two out.")
        other = describe_job(without(arguments, split.options["without"]))
        if "json" in split.options:
            print(json.dumps({"without": to_json(other.program), "with": to_json(job.program)}))
            return 0
        option = split.options["without"]
        print(compare(other.program, job.program, (f"without {option}", f"with {option}"), ranks))
        return 0
    if "html" in split.options:
        _write_page(Path(split.options["html"]), arguments, job.program)
    if "json" in split.options:
        document = to_json(job.program)
        if ranks is not None:
            document["ranks"] = [entry for entry in document["ranks"] if entry["rank"] in ranks]
        print(json.dumps(document))
    else:
        print(to_text(job.program, ranks))
    return 0


def without(arguments: TrainingArguments, option: str) -> TrainingArguments:
    """The arguments with a key at its default, or with a flag left out of every config.

    Raises:
        UserError: when there is no such option, or it is not set.
    """
    flags = {name: flag.name for flag in FLAGS for name in (flag.name, *flag.aliases)}
    if option in OPTIONS:
        default = OPTIONS[option].default
        if getattr(arguments, option) == default:
            raise UserError(f"--without {option}", "it is not set", "Name an option that the config sets")
        return replace(arguments, **{option: default})
    if option in flags:
        name = flags[option]
        if not any(name in getattr(arguments, config) for config in CONFIGS):
            raise UserError(f"--without {option}", "no config sets this flag", "Name a flag that is set")
        kept: dict[str, Any] = {c: tuple(flag for flag in getattr(arguments, c) if flag != name) for c in CONFIGS}
        return replace(arguments, **kept)
    known = nearest(option, [*OPTIONS, *flags])
    raise UserError(f"--without {option}", "there is no such key or flag", f"Did you mean {known}?")


def _rank(text: str, world_size: int) -> int:
    if not text.isdecimal() or int(text) >= world_size:
        raise UserError(f"--rank {text}", f"ranks are 0 to {world_size - 1}", "Name one of them")
    return int(text)


def _write_page(path: Path, arguments: TrainingArguments, program: Program) -> None:
    from syncline.reports.page import program_page

    try:
        path.write_text(program_page(program, resolved_yaml(arguments)), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html {path}", f"it cannot be written: {error.strerror}", "Name another file") from error
