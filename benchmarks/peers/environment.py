"""The environment that all peers run in: it holds libraries that Syncline does not need, and is built on first use."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / "outputs" / "benchmark-peers"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
CONSTRAINTS = ROOT / "constraints.txt"
COMPLETE = ENVIRONMENT / "complete"
"""Written last; holds what the environment was built from."""
PYTHON = ENVIRONMENT / "bin" / "python"


class CannotInstall(Exception):
    """The environment cannot be built; the message says what failed."""


def peers_python() -> Path:
    """The environment's Python, after minutes where the environment is missing, unfinished or out of date.

    Raises `CannotInstall`, after pip has said why on stderr.
    """
    ENVIRONMENT.parent.mkdir(exist_ok=True)
    with FileLock(f"{ENVIRONMENT}.lock"):
        if not COMPLETE.exists() or COMPLETE.read_text() != _source():
            _build()
    return PYTHON


def library_versions() -> str:
    """Of the libraries that only this environment has and that are peers."""
    pinned = dict(line.split("==") for line in REQUIREMENTS.read_text().splitlines() if "==" in line)
    return ", ".join(f"{library} {pinned[library]}" for library in ("accelerate", "deepspeed"))


def _source() -> str:
    digest = hashlib.sha256()
    for part in (sys.version.encode(), REQUIREMENTS.read_bytes(), CONSTRAINTS.read_bytes()):
        digest.update(part)
    return digest.hexdigest()


def _build() -> None:
    print(f"building the peers' environment in {ENVIRONMENT}: this takes minutes, once", file=sys.stderr)
    COMPLETE.unlink(missing_ok=True)
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(ENVIRONMENT))
    chosen = ("--requirement", str(REQUIREMENTS), "--constraint", str(CONSTRAINTS))
    _run(str(PYTHON), "-m", "pip", "install", "--quiet", "--quiet", "--disable-pip-version-check", *chosen)
    COMPLETE.write_text(_source())


def _run(*command: str) -> None:
    """What the command prints goes to stderr: stdout is for figures."""
    # DeepSpeed would compile for accelerators that are not there.
    environment = {**os.environ, "DS_BUILD_OPS": "0"}
    status = subprocess.run(command, stdout=sys.stderr, env=environment).returncode
    if status:
        raise CannotInstall(f"the peers' environment cannot be built: `{' '.join(command)}` ended with status {status}")
