"""Every command that the documents name runs: here, or in what CI calls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CI = (ROOT / ".ci" / "run").read_text()


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]


NAMED = [(page.relative_to(ROOT), command) for page in PAGES for command in commands(page)]
RUN_BY_CI = [command for _, command in NAMED if command.startswith(("make ", "python benchmarks/"))]
RUN_HERE = [command for _, command in NAMED if command not in RUN_BY_CI]


def test_the_documents_name_commands():
    assert {page.name for page, _ in NAMED} >= {"README.md", "CONTRIBUTING.md", "benchmarks.md"}
    assert "make demo" in (ROOT / "README.md").read_text()
    assert {"make demo", "make test", "make check"} <= set(CI.splitlines())


@pytest.mark.parametrize("command", RUN_BY_CI)
def test_ci_runs_what_takes_long(command: str):
    words = command.split()
    assert " ".join(words[:2]) in CI


@pytest.mark.command
@pytest.mark.parametrize("command", dict.fromkeys(RUN_HERE))
def test_the_command_runs(command: str):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path}
    run = subprocess.run(command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page: Path):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("http") or (page.parent / link).exists(), link
    for name in re.findall(r"`((?:src|tests|benchmarks|examples|docs)/[\w./]+)`", text):
        assert (ROOT / name).exists(), name
