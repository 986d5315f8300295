"""Rooms import downwards only, and what is to stay light imports nothing heavy."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "syncline"

ROOMS = (
    *("errors", "compat", "distributed"),
    *("schedules", "optimizers", "arguments", "strategy", "program"),
    *("data", "modeling", "checkpoint", "runtime", "reports", "training", "verification", "cli", "__main__"),
)
"""From the bottom to the top: a room imports from itself and from rooms before it."""

PURE = ("errors", "schedules", "arguments", "strategy", "program")
"""These import neither torch nor transformers, so a job of any size is planned and verified on a laptop."""

HEAVY = {"torch", "transformers", "numpy", "datasets", "tokenizers", "safetensors"}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports when it is imported; what only type checkers see is left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


def at_import(path: Path) -> Iterator[str]:
    """The same without what functions import when they run."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = [ast.Pass()]
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


def test_the_root_holds_rooms_and_little_else():
    files = {path.name for path in SOURCE.iterdir() if path.is_file()} - {"py.typed"}
    assert files <= {"__init__.py", "__main__.py", "errors.py", "compat.py"}
    assert {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"} <= set(ROOMS)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_room_imports_upwards(path: Path):
    if path.parent == SOURCE and path.name == "__init__.py":
        return  # The public names, which are looked up when they are asked for.
    own = ROOMS.index(room_of(path))
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "syncline" and len(parts) > 1:
            assert ROOMS.index(parts[1]) <= own, f"{name} is above {ROOMS[own]}"
        assert parts[0] not in ("tests", "tools", "benchmarks")


@pytest.mark.parametrize("path", [path for path in modules() if room_of(path) in PURE], ids=str)
def test_what_plans_a_job_imports_nothing_heavy(path: Path):
    assert not {name.split(".")[0] for name in at_import(path)} & HEAVY


def test_only_resolving_knows_arguments():
    knowing = {
        path.relative_to(SOURCE).parts[:2]
        for path in modules()
        if room_of(path) in ("program", "strategy") and any("syncline.arguments" in name for name in imported(path))
    }
    assert knowing == {("strategy", "resolve")}
