"""The command line: which command is meant, and how a user's mistake ends.

Nothing heavy is imported until a command runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from syncline.arguments.nearest import nearest
from syncline.errors import UserError

OVERVIEW = """\
syncline: train a Hugging Face causal language model on many devices, and know what its gradients do.

  syncline train [CONFIG] [--key value ...]    train; without CONFIG, the built-in demonstration (two minutes)
  syncline program CONFIG [--key value ...]    print one optimizer step as a program, verified
  syncline verify CONFIG [--key value ...]     prove on small shapes that it computes the gradient of one process

CONFIG is YAML or JSON with the keys of `syncline train --help`; every key can be overridden as --key value.
`syncline COMMAND --help` says more about a command.
"""

PROGRAM_HELP = """\
syncline program CONFIG [--key value ...] [--rank R] [--json] [--html FILE] [--without OPTION]

Prints the actions of one optimizer step on every rank (one rank of each stage), after verifying them.

  --rank R           only rank R
  --json             one JSON document on stdout
  --html FILE        a page that draws the program
  --without OPTION   what the option (a key or a flag) moves: the difference from the program without it; with --json
                     both programs, as "without" and "with"
  --key value        any key of `syncline train --help`
"""

VERIFY_HELP = """\
syncline verify CONFIG [--key value ...] [--json]

Trains a shrunken model of CONFIG's family for 3 steps in float64, on this machine's CPU, with CONFIG's degrees and
options, on batches with uneven token counts, masked ranks, unused and frozen parameters; and compares every parameter
on every rank with one process that sees the whole global batch. Exit status 0 when the largest relative error is at
most 1e-10, else 1.

  --json             one JSON document on stdout
  --key value        any key of `syncline train --help`
"""

ARRIVING = {
    "plan": "arrives with the planner. `syncline program` prints the step, its bytes and its gradient memory today",
    "convert": "arrives with checkpoints. `syncline train` leaves a Hugging Face folder in output_dir/model today",
    "data": "arrives with dataset preparation. `syncline train` prepares and caches its data itself today",
    "doctor": "arrives with the planner. `syncline verify` tries a configuration on this machine today",
}
"""Commands that are named in the design and are not here yet."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 success, 1 the run failed, 2 the request was wrong."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(OVERVIEW, end="")
        return 0
    if argv[0] == "--version":
        return _version()
    try:
        return _command(argv[0])(argv[1:])
    except UserError as error:
        print(f"syncline: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever reads our output has seen enough, as `head` does. What is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _command(name: str) -> Callable[[list[str]], int]:
    commands = {"train": _train, "program": _program, "verify": _verify}
    if name in ARRIVING:
        raise UserError(f"syncline {name}", f"it {ARRIVING[name].split('. ')[0]}", ARRIVING[name].split(". ")[1])
    if name not in commands:
        raise UserError(f"syncline {name}", "there is no such command", f"Did you mean {nearest(name, commands)}?")
    return commands[name]


def _train(argv: list[str]) -> int:
    if _asks_for_help(argv):
        from syncline.arguments import help_text

        print("syncline train [CONFIG] [--key value ...]\n\n" + help_text(), end="")
        return 0
    from syncline.cli.train import train

    return train(argv)


def _program(argv: list[str]) -> int:
    if _asks_for_help(argv):
        print(PROGRAM_HELP, end="")
        return 0
    from syncline.cli.program import program

    return program(argv)


def _verify(argv: list[str]) -> int:
    if _asks_for_help(argv):
        print(VERIFY_HELP, end="")
        return 0
    from syncline.cli.verify import verify

    return verify(argv)


def _version() -> int:
    from importlib.metadata import version

    print(f"syncline {version('syncline')}")
    return 0


def _asks_for_help(argv: list[str]) -> bool:
    return "-h" in argv or "--help" in argv
