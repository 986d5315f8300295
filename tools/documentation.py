"""What is generated in the documentation: whole pages, and sections of pages, so that they cannot go stale.

A section stands between the lines `<!-- begin NAME -->` and `<!-- end NAME -->`.
`python -m tools.documentation` writes them, `python -m tools.documentation --check` fails if one is not current.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from difflib import unified_diff
from pathlib import Path

from syncline.arguments import OPTIONS
from syncline.arguments.flags import CONFIGS, FLAGS, Flag, Need
from syncline.arguments.foreign import MEANINGLESS, REFUSALS, TRANSLATIONS
from syncline.arguments.option import GROUPS, Option
from syncline.program.display.text import listing
from syncline.strategy import Sharding, SyncMoment
from syncline.strategy.resolve.ineffective import INEFFECTIVE
from syncline.strategy.resolve.unsupported import UNSUPPORTED
from syncline.strategy.topology import Topology
from tools.combinations_page import combinations_markdown
from tools.example import example_program, example_strategy
from tools.markdown import code, table
from tools.schedules_page import schedules_markdown


def options_markdown() -> str:
    """Every option and flag, what arrives later, what has no effect when, and what other tools spell otherwise."""
    return "\n".join([*_introduction(), *_options(), *_flags(), *_not_yet(), *_no_effect(), *_other_spellings()])


def program_markdown() -> str:
    """The default step of the example program."""
    return code("text", listing(example_program(example_strategy(average_in_collective=True)), 0))


def moved_markdown() -> str:
    """What `gradient_sync_after_accumulate` moves in the example program."""
    plain = example_program(example_strategy(sync=SyncMoment.EVERY_MICRO_BATCH, overlap=False))
    moved = example_program(example_strategy(sync=SyncMoment.AFTER_ACCUMULATION, overlap=False))
    lines = unified_diff(
        listing(plain, 0), listing(moved, 0), "every_micro_batch", "gradient_sync_after_accumulate", lineterm="", n=3
    )
    return code("diff", lines)


def sharded_markdown() -> str:
    """The step of the example program under stage 1 by slices, released."""
    strategy = example_strategy(topology=Topology(sharding=2), sharding=Sharding.STAGE1_SLICE, release_gradients=True)
    return code("text", listing(example_program(strategy), 0))


def life_markdown() -> str:
    """The options of a gradient's life in one table."""
    options = [OPTIONS[name] for name in LIFE_OPTIONS]
    flags = [flag for flag in FLAGS if flag.name in LIFE_FLAGS]
    rows = [(f"`{option.name}`", option.effect, option.cost) for option in options]
    rows += [(f"`{flag.name}`", flag.effect, flag.cost) for flag in flags]
    return "\n".join(table(("Option", "What it does to the program", "What it costs and buys"), rows)).strip()


LIFE_OPTIONS = (
    "gradient_sync",
    "overlap_gradient_reduction",
    "overlap_parameter_gather",
    "release_grads",
    "gradient_reduce_dtype",
    "sharding",
)

LIFE_FLAGS = (
    "gradient_sync_after_accumulate",
    "enable_allreduce_avg_in_gradient_scale",
    "enable_delay_scale_loss",
    "enable_release_grads",
    "split_param",
    "free_grads_in_comm",
)

PAGES: dict[str, Callable[[], str]] = {
    "docs/options.md": options_markdown,
    "docs/combinations.md": combinations_markdown,
    "docs/schedules.md": schedules_markdown,
}
"""Every generated page by its path in the repository."""

SECTIONS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"program": program_markdown, "life": life_markdown},
    "docs/architecture.md": {"moved": moved_markdown, "sharded": sharded_markdown},
}
"""Every generated section by its page and name."""


def current_page(root: Path, path: str) -> str:
    """The text that the page should have: generated whole, or as it is with its sections generated again."""
    if path in PAGES:
        return PAGES[path]()
    page = (root / path).read_text()
    for name, text in SECTIONS[path].items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        assert found, f"{path} has no section {name}"
        assert closed, f"{path} does not end its section {name}"
        page = before + begin + text() + "\n" + end + after
    return page


def stale_pages(root: Path) -> list[str]:
    """The pages below `root` whose text is not what the code says now."""
    return [
        path
        for path in (*PAGES, *SECTIONS)
        if not (root / path).is_file() or (root / path).read_text() != current_page(root, path)
    ]


def main(words: list[str]) -> int:
    """Writes the pages below the working folder, or, with `--check`, lists those that are stale. An exit status."""
    root = Path.cwd()
    if words == ["--check"]:
        stale = stale_pages(root)
        for path in stale:
            print(f"{path} is not current: run python -m tools.documentation", file=sys.stderr)
        return 1 if stale else 0
    if words:
        print("usage: python -m tools.documentation [--check]", file=sys.stderr)
        return 2
    for path in (*PAGES, *SECTIONS):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(current_page(root, path))
    return 0


def _introduction() -> Iterator[str]:
    yield "<!-- Generated by `python -m tools.documentation`. Change the words in src/syncline/arguments/. -->"
    yield ""
    yield "# Options"
    yield ""
    yield (
        "Every key stands flat in a YAML or JSON file and can be overridden with `--key value`. *Program* says what an "
        "option does to the list of actions that one optimizer step is (`syncline program` prints it). `k` is "
        "`gradient_accumulation_steps`, `n` the number of data-parallel replicas. `null` means the default."
    )
    yield ""
    yield "What contradicts itself is refused. What has no effect is a warning. Nothing is ignored silently."
    yield ""


def _options() -> Iterator[str]:
    for group in GROUPS:
        yield f"## {group}"
        yield ""
        members = [option for option in OPTIONS.values() if option.group == group]
        yield from table(
            ("Key", "Default", "Meaning", "Program", "Costs and buys"),
            ((_key(each), f"`{each.default_name}`", each.help, each.effect, each.cost) for each in members),
        )


def _key(option: Option) -> str:
    also = ", ".join(f"`{alias}`" for alias in option.aliases)
    return f"`{option.name}`" + (f" (also {also})" if also else "")


def _flags() -> Iterator[str]:
    yield "## Flags"
    yield ""
    yield (
        "A `*_parallel_config` holds flags, separated by spaces or commas, or as a list. A flag whose need is not met "
        "has no effect, and is a warning."
    )
    yield ""
    for config in CONFIGS:
        yield f"### {config}"
        yield ""
        members = [flag for flag in FLAGS if config in flag.configs]
        yield from table(
            ("Flag", "Status", "Needs", "Meaning", "Program", "Costs and buys"),
            (_flag_row(flag) for flag in members),
        )


def _flag_row(flag: Flag) -> tuple[str, ...]:
    also = ", ".join(f"`{alias}`" for alias in flag.aliases)
    needs = "–" if flag.needs is Need.NOTHING else flag.needs.value
    reason = flag.no_effect or (flag.refused or ("",))[0]
    name = f"`{flag.name}`" + (f" (also {also})" if also else "")
    return name, flag.status_text, needs, flag.meaning, flag.effect, reason or flag.cost


def _not_yet() -> Iterator[str]:
    yield "## Not yet here"
    yield ""
    yield "Known by name, and refused until the feature is here."
    yield ""
    keys = [(f"`{entry.option}`", entry.values, str(entry.arrives), entry.arrives.instead) for entry in UNSUPPORTED]
    flags = [
        (f"`{flag.name}`", f"with {flag.needs.value}", str(flag.arrives), flag.arrives.instead)
        for flag in FLAGS
        if flag.arrives
    ]
    yield from table(("Key or flag", "Values", "Arrives", "Until then"), [*keys, *flags])


def _no_effect() -> Iterator[str]:
    yield "## Without effect"
    yield ""
    yield "A key that is given and changes nothing is a warning:"
    yield ""
    yield from table(("Key", "When"), ((f"`{entry.option}`", entry.because) for entry in INEFFECTIVE))


def _other_spellings() -> Iterator[str]:
    yield "## Keys of Hugging Face and PaddleNLP"
    yield ""
    yield "Written differently here:"
    yield ""
    yield from table(("Key", "Means"), ((f"`{key}`", each.meaning) for key, each in TRANSLATIONS.items()))
    yield "Refused, unless switched off:"
    yield ""
    yield from table(
        ("Key", "Why", "Instead"), ((f"`{key}`", each.wrong, each.instead) for key, each in REFUSALS.items())
    )
    yield "Without meaning here, hence a warning:"
    yield ""
    reasons = dict.fromkeys(MEANINGLESS.values())
    yield from table(
        ("Why", "Keys"),
        (
            (reason, ", ".join(f"`{key}`" for key, because in MEANINGLESS.items() if because == reason))
            for reason in reasons
        ),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
