"""How figures are told: the machine they come from, their spread, tables, and generated sections of a page."""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from itertools import accumulate
from math import comb
from pathlib import Path

SECTIONS = ("against_ddp", "side_by_side", "gradient_life", "schedules", "cool_down", "timers", "startup")
"""The generated sections of the page, in their order; each is named after the benchmark that writes it."""

CONFIDENCE = 0.95
LEAST_REPETITIONS = 6
"""With fewer figures no interval has the confidence."""

INTRODUCTION = f"""\
# Benchmarks

Each section is written by the command that measures it. Times are medians. A ratio is the median over pairs of steps
that ran one after the other in the same processes, and is surer than the two times; with it stands the interval in
which the true median lies with a confidence of {CONFIDENCE:.0%}.

```console
$ python benchmarks/against_ddp.py --write docs/benchmarks.md
$ python benchmarks/side_by_side.py --write docs/benchmarks.md
$ python benchmarks/gradient_life.py --write docs/benchmarks.md
$ python benchmarks/schedules.py --write docs/benchmarks.md
$ python benchmarks/cool_down.py --write docs/benchmarks.md
$ python benchmarks/timers.py --write docs/benchmarks.md
$ python benchmarks/startup.py --write docs/benchmarks.md
```
"""


@dataclass(frozen=True)
class Spread:
    """The median of some figures, and where the true median lies with a confidence of `CONFIDENCE`."""

    lower: float
    median: float
    upper: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """From at least `LEAST_REPETITIONS` figures; the interval ends at two of them, whatever their distribution.

        Source: the sign test; a figure lies above the true median as often as a coin falls heads.
        """
        assert len(values) >= LEAST_REPETITIONS, f"{len(values)} figures say too little"
        ordered = sorted(values)
        cut = _cut_on_each_side(len(ordered))
        return Spread(ordered[cut], statistics.median(ordered), ordered[-1 - cut])


def verdict(ratio: Spread) -> str:
    """What a ratio of times says for sure."""
    return "faster" if ratio.upper < 1 else "slower" if ratio.lower > 1 else "no difference"


def pair_ratios(values: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Each value divided by what the baseline needed in the same turn."""
    return [value / base for value, base in zip(values, baseline, strict=True)]


def describe_machine() -> str:
    """Date, processor, cores, memory and versions, in one line."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    parts = (
        date.today().isoformat(),
        _processor(),
        f"{os.cpu_count()} cores",
        f"{pages / 2**30:.0f} GiB memory",
        f"{platform.system()} {platform.machine()}",
        f"Python {platform.python_version()}",
        f"torch {version('torch')}",
        f"transformers {version('transformers')}",
    )
    return ", ".join(parts)


def mebibytes(size: float) -> str:
    return f"{size / 2**20:.1f}"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"


def repetitions(text: str) -> int:
    """The value of an option that says how often something is measured. Raises `ArgumentTypeError` for too few."""
    if not text.isdecimal() or int(text) < LEAST_REPETITIONS:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {LEAST_REPETITIONS}")
    return int(text)


def option_parser(description: str | None, default: int) -> argparse.ArgumentParser:
    """Of a benchmark that repeats itself `default` times and can write its section into a page."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--repetitions",
        type=repetitions,
        default=default,
        metavar="N",
        help=f"how often each takes its turn, at least {LEAST_REPETITIONS} (default {default})",
    )
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the section into this page")
    return parser


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table whose first column is text and whose others are figures."""
    rule = ["---", *("---:" for _ in head[1:])]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)]


def write_section(page: Path, name: str, text: str) -> None:
    """Replace one generated section of `page`, which is made if it is not there; the other sections stay."""
    if not page.exists():
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text("\n".join([INTRODUCTION, *(_section(each, "Not measured yet.") for each in SECTIONS)]))
    missing = missing_section(page, name)
    if missing:
        raise SystemExit(missing)
    page.write_text(_marked(name).sub(lambda _: _section(name, text), page.read_text()))


def missing_section(page: Path, name: str) -> str | None:
    """Why `write_section` cannot write into `page`, with the remedy; None when it can."""
    if not page.exists() or _marked(name).search(page.read_text()):
        return None
    return f"{page} has no section between `{_begin(name)}` and `{_end(name)}`: add these two lines to it"


def _marked(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(_begin(name)) + ".*?" + re.escape(_end(name)) + "\n", re.DOTALL)


def _section(name: str, text: str) -> str:
    return f"{_begin(name)}\n{text}\n{_end(name)}\n"


def _begin(name: str) -> str:
    return f"<!-- begin {name}: written by `python benchmarks/{name}.py --write docs/benchmarks.md` -->"


def _end(name: str) -> str:
    return f"<!-- end {name} -->"


def _cut_on_each_side(count: int) -> int:
    """How many of `count` sorted figures may be cut from each end before the confidence falls below `CONFIDENCE`."""
    tails = accumulate(2 * comb(count, heads) for heads in range(count // 2))
    return sum(tail <= (1 - CONFIDENCE) * 2**count for tail in tails) - 1


def _processor() -> str:
    """The processor's name where the system tells it."""
    information = Path("/proc/cpuinfo")
    text = information.read_text() if information.exists() else ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return named[1] if named else platform.processor() or "unknown processor"
