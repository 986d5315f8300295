"""How a rank ended: recorded by the rank, read by the launcher, told to the user.

A rank that fails takes its peers with it, so that a failing job has many errors and one cause. Ranks therefore record
what kind of end they met, and `report_failures` shows the first one that no other rank explains.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from syncline.errors import UserError

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Where a rank writes its failure, as torch's elastic launchers name it."""


class FailureKind(str, Enum):
    """Why a rank ended."""

    REQUEST = "request"
    """A `UserError`: the request was wrong."""
    ERROR = "error"
    CONSEQUENCE = "consequence"
    """A peer was lost: the cause is on another rank."""
    SILENT = "silent"
    """Killed, or ended without an exception: seen by the launcher, not recorded."""


@dataclass(frozen=True)
class Failure:
    """The end of one rank."""

    rank: int
    kind: FailureKind
    time: float
    """Seconds since the epoch."""
    message: str
    traceback: str = ""


def failure_of(rank: int, error: BaseException) -> Failure:
    """The failure that `error`, just caught on `rank`, amounts to."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if isinstance(error, UserError):
        return Failure(rank, FailureKind.REQUEST, time.time(), str(error), text)
    kind = FailureKind.CONSEQUENCE if _lost_a_peer(error) else FailureKind.ERROR
    return Failure(rank, kind, time.time(), f"{type(error).__name__}: {error}", text)


def record_failure(failure: Failure) -> None:
    """Write the error file, whole or not at all, where a launcher has named one.

    Its form is that of torch's elastic launchers with our own part added, so that torchrun shows it as well.
    """
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path:
        return
    details = {"py_callstack": failure.traceback, "timestamp": str(int(failure.time))}
    content = {
        "message": {"message": failure.message, "extraInfo": details},
        "syncline": {"kind": failure.kind.value, "time": failure.time, "traceback": failure.traceback},
    }
    draft = Path(f"{path}.draft")
    draft.write_text(json.dumps(content), encoding="utf-8")
    draft.replace(path)


def read_failure(rank: int, path: str) -> Failure:
    """The failure that `rank` recorded in the file `path`."""
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    own = content["syncline"]
    return Failure(rank, FailureKind(own["kind"]), own["time"], content["message"]["message"], own["traceback"])


def cause(failures: Sequence[Failure]) -> Failure:
    """The first failure that no other one explains."""
    return min(failures, key=lambda failure: (failure.kind is FailureKind.CONSEQUENCE, failure.time))


def report_failures(failures: Sequence[Failure], world_size: int) -> int:
    """Tell the user on stderr what ended the run, with its rank and traceback; return the exit status.

    That is 0 without failures, 2 when the cause is a request that was wrong, else 1.
    """
    if not failures:
        return 0
    first = cause(failures)
    if first.kind is FailureKind.REQUEST:
        print(f"syncline: {first.message}", file=sys.stderr)
        return 2
    verb = "" if first.kind is FailureKind.SILENT else "failed: "
    print(f"{first.traceback}syncline: rank {first.rank} of {world_size} {verb}{first.message}", file=sys.stderr)
    return 1


_LOST_PEER = re.compile(
    r"gloo/transport|Connection (reset|closed|refused)|Broken pipe|Application timeout caused pair closure"
)


def _lost_a_peer(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, is what a collective says when another rank has gone."""
    if type(error).__module__.startswith("torch") and type(error).__name__.startswith("Dist"):
        return True
    if isinstance(error, (RuntimeError, ConnectionError)) and _LOST_PEER.search(str(error)):
        return True
    return error.__cause__ is not None and _lost_a_peer(error.__cause__)
