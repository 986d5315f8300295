"""When each action of each step ran: a file of JSON lines for each rank, written while a timed run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.program.actions import Action
from syncline.program.display.text import action_json

if TYPE_CHECKING:
    from syncline.runtime.timing import ActionTime

Entry = Mapping[str, Any]
"""A line: `step`, `began` in seconds since the epoch, `position` in the rank's actions, `start` and `end` in seconds
since the step began, and the action's own JSON.
"""

Timelines = Mapping[int, Iterable[Sequence[Entry]]]
"""By rank, step by step, the entries of a step."""

PREFIX = "timeline-rank"


class TimelineFile:
    """Where one rank writes."""

    def __init__(self, folder: Path, rank: int, actions: Sequence[Action]) -> None:
        self._path = folder / f"{PREFIX}{rank}.jsonl"
        # What is the same in every step is put into words once.
        self._tails = [json.dumps(action_json(action))[1:] for action in actions]

    def write(self, step: int, began: float, times: Iterable[ActionTime]) -> None:
        """Add a step's lines."""
        with self._path.open("a", encoding="utf-8") as file:
            for time in times:
                file.write(
                    f'{{"step": {step}, "began": {began!r}, "position": {time.position}, "start": {time.start:.9f}, '
                    f'"end": {time.end:.9f}, {self._tails[time.position]}\n'
                )


def timeline_paths(folder: Path) -> dict[int, Path]:
    """By rank its file in the folder of a run."""
    return {int(path.stem.removeprefix(PREFIX)): path for path in sorted(folder.glob(f"{PREFIX}*.jsonl"))}


def read_timelines(folder: Path) -> dict[int, Iterator[list[Entry]]]:
    """The timelines in the folder of a run, read as they are asked for: a long run's do not fit into memory."""
    return {rank: read_steps(path) for rank, path in timeline_paths(folder).items()}


def read_steps(path: Path) -> Iterator[list[Entry]]:
    """Step by step the entries of one rank."""
    with path.open(encoding="utf-8") as file:
        for _, entries in groupby(map(json.loads, file), key=lambda entry: entry["step"]):
            yield list(entries)
