"""Process groups that are made once and used by many runs on the same ranks, one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist


class ReusedGroups:
    """Making a group costs sockets and threads on every rank; a run of a tiny model costs less.

    Within one run, groups of the same ranks stay as many as the run asks for.
    """

    def __init__(self) -> None:
        self._make = dist.new_group
        self._made: dict[tuple[tuple[int, ...], int], Any] = {}
        self._asked: Counter[tuple[int, ...]] = Counter()

    def next_run(self) -> None:
        """All groups are free again; called by all ranks, between two runs."""
        self._asked.clear()

    def new_group(self, ranks: list[int], **options: Any) -> Any:
        members = tuple(ranks)
        key = (members, self._asked[members])
        self._asked[members] += 1
        if key not in self._made:
            self._made[key] = self._make(ranks, **options)
        return self._made[key]


@contextmanager
def reused_groups() -> Iterator[ReusedGroups]:
    groups = ReusedGroups()
    with mock.patch.object(dist, "new_group", groups.new_group):
        yield groups
