"""The generated pages are current and complete."""

from itertools import pairwise
from pathlib import Path

import pytest
from tools.documentation import PAGES, SECTIONS, main, options_markdown, stale_pages

from syncline.arguments import OPTIONS
from syncline.arguments.flags import FLAGS
from syncline.arguments.foreign import MEANINGLESS, REFUSALS, TRANSLATIONS
from syncline.strategy.resolve.unsupported import UNSUPPORTED

ROOT = Path(__file__).parents[2]


def test_pages_in_the_repository_are_current():
    assert stale_pages(ROOT) == []


def test_every_option_flag_and_known_key_is_on_the_page():
    text = options_markdown()
    for name in [*OPTIONS, *(flag.name for flag in FLAGS), *TRANSLATIONS, *REFUSALS, *MEANINGLESS]:
        assert f"`{name}`" in text


def test_what_is_not_here_yet_is_tracked():
    tracked = options_markdown().split("## Not yet here")[1].split("\n## ")[0]
    for entry in UNSUPPORTED:
        assert f"| `{entry.option}` | {entry.values} | {entry.arrives} |" in tracked
    for flag in FLAGS:
        assert (f"| `{flag.name}` |" in tracked) == (flag.arrives is not None)


def test_every_row_has_the_cells_of_its_table():
    rows = [line.replace("\\|", "") for line in options_markdown().splitlines()]
    for row, following in pairwise(rows):
        if row.startswith("|") and following.startswith("|"):
            assert row.count("|") == following.count("|"), following


def test_the_command_writes_and_checks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for path, sections in SECTIONS.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        empty = [f"<!-- begin {name} -->\n\n<!-- end {name} -->\n" for name in sections]
        (tmp_path / path).write_text("Kept.\n" + "".join(empty))
    assert main(["--check"]) == 1
    said = capsys.readouterr().err
    assert all(f"{path} is not current" in said for path in (*PAGES, *SECTIONS))
    assert main([]) == 0
    assert main(["--check"]) == 0
    assert all((tmp_path / path).is_file() for path in PAGES)
    assert all((tmp_path / path).read_text().startswith("Kept.\n<!-- begin") for path in SECTIONS)


@pytest.mark.parametrize("words", [["--help"], ["--check", "more"]])
def test_the_command_refuses_other_words(words):
    assert main(words) == 2
