"""Ranks, their coordinates along the parallel axes, and the groups these coordinates span.

Vocabulary: an *axis* is one way of splitting the work (`pp` positions in a pipeline, `dp` replicas, `sharding`
replicas that also divide optimizer state, `sep` sequence parts, `tp` tensor slices). Its *degree* is the number of
parts. A *group along axes* is the set of ranks that differ in those axes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

AXES = ("pp", "dp", "sharding", "sep", "tp")
REPLICA_AXES = ("dp", "sharding")
"""The axes along which ranks hold the same parameters and see different samples."""

AXIS_ORDERS = {
    "pp_first": ("pp", "dp", "sharding", "sep", "tp"),
    "sharding_first": ("dp", "sharding", "pp", "sep", "tp"),
}
"""Outermost axis first: ranks that differ in the last axis only are neighbours."""


@dataclass(frozen=True)
class Topology:
    """The degrees of a job, and the mapping between global ranks and coordinates."""

    pp: int = 1
    dp: int = 1
    sharding: int = 1
    sep: int = 1
    tp: int = 1
    order: str = "pp_first"

    @property
    def degrees(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world_size(self) -> int:
        return prod(self.degrees.values())

    @property
    def replicas(self) -> int:
        """How many ranks share each parameter and see different samples: `n` in every formula."""
        return prod(getattr(self, axis) for axis in REPLICA_AXES)

    def coordinate(self, rank: int) -> dict[str, int]:
        """The position of `rank` along every axis."""
        return self._coordinates[rank]

    def position(self, rank: int) -> int:
        """The place of `rank` in its pipeline."""
        return self._coordinates[rank]["pp"]

    def replica(self, rank: int) -> int:
        """The index of `rank` among the ranks that hold the same parameters."""
        position = 0
        for axis in REPLICA_AXES:
            position = position * getattr(self, axis) + self._coordinates[rank][axis]
        return position

    def rank(self, **coordinate: int) -> int:
        """The global rank at a coordinate; axes that are not named are 0."""
        return self._ranks[tuple(coordinate.get(axis, 0) for axis in AXES)]

    def neighbour(self, rank: int, **changed: int) -> int:
        """The rank whose coordinate is that of `rank` but for the named axes."""
        return self.rank(**{**self._coordinates[rank], **changed})

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks, ascending, that differ from `rank` in `axes` only (itself included)."""
        return _groups_by_rank(self, axes)[rank]

    def groups(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Every group along `axes`, in the order of its first rank."""
        return tuple(dict.fromkeys(_groups_by_rank(self, axes)))

    @cached_property
    def _coordinates(self) -> tuple[dict[str, int], ...]:
        order = AXIS_ORDERS[self.order]
        coordinates = []
        for rank in range(self.world_size):
            position, rest = {}, rank
            for axis in reversed(order):
                rest, position[axis] = divmod(rest, getattr(self, axis))
            coordinates.append(position)
        return tuple(coordinates)

    @cached_property
    def _ranks(self) -> dict[tuple[int, ...], int]:
        return {tuple(c[axis] for axis in AXES): rank for rank, c in enumerate(self._coordinates)}


@lru_cache(maxsize=256)
def _groups_by_rank(topology: Topology, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """For every rank its group along `axes`."""
    members: dict[tuple[int, ...], list[int]] = {}
    keys = [
        tuple(topology.coordinate(rank)[axis] for axis in AXES if axis not in axes)
        for rank in range(topology.world_size)
    ]
    for rank, key in enumerate(keys):
        members.setdefault(key, []).append(rank)
    groups = {key: tuple(ranks) for key, ranks in members.items()}
    return tuple(groups[key] for key in keys)
