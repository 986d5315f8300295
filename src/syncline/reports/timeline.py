"""When each action of each step ran: a file of JSON lines for each rank, written while a timed run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.program.actions import Action

if TYPE_CHECKING:
    from syncline.runtime.clock import ActionTime

Entry = Mapping[str, Any]
"""A line: `step`, `began` in seconds since the epoch, `position` in the rank's actions, `start` and `end` in seconds
since the step began, and the action's own JSON.
"""

PREFIX = "timeline-rank"


class TimelineFile:
    """Where one rank writes."""

    def __init__(self, folder: Path, rank: int, actions: Sequence[Action]) -> None:
        self._path = folder / f"{PREFIX}{rank}.jsonl"
        # What is the same in every step is put into words once.
        self._tails = [json.dumps(action.to_json())[1:] for action in actions]

    def write(self, step: int, began: float, times: Iterable[ActionTime]) -> None:
        """Add a step's lines."""
        with self._path.open("a", encoding="utf-8") as file:
            for time in times:
                file.write(
                    f'{{"step": {step}, "began": {began!r}, "position": {time.position}, "start": {time.start:.9f}, '
                    f'"end": {time.end:.9f}, {self._tails[time.position]}\n'
                )


def timeline_paths(folder: Path) -> list[Path]:
    """Every rank's file in the folder of a run."""
    return sorted(folder.glob(f"{PREFIX}*.jsonl"))


def read_timelines(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """By rank the entries of every timeline in the folder of a run."""
    return {
        int(path.stem.removeprefix(PREFIX)): list(map(json.loads, path.read_text(encoding="utf-8").splitlines()))
        for path in timeline_paths(folder)
    }
