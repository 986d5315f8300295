"""Where every parameter lives: its stage, its bucket, its offset, its owner. Computed once, asked by everyone.

A *bucket* is one flat buffer. Parameters, gradients, optimizer state of a bucket share its offsets, so that a bucket is
reduced by one collective and updated by one fused optimizer call. Offsets are counted in elements, not bytes.

Under sharding the ranks of a sharding group divide the *ownership* of what they all hold: each rank updates what it
owns. Either a bucket belongs to one rank (by tensors), or each rank owns an equal slice of every bucket (by slices).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import prod

from syncline.strategy import Ownership

ALIGNMENT = 64
"""Elements to which every parameter's offset is rounded up: 256 bytes in float32, so that every view suits the GEMM
kernels.
"""


@dataclass(frozen=True)
class ParameterSpec:
    """What the program needs to know of one parameter on one stage."""

    name: str
    """The global state-dict name."""
    shape: tuple[int, ...]
    stage: int
    settings: int = 0
    """Which of the job's optimizer settings applies (weight decay, learning rate, optimizer)."""
    tied_to: str | None = None
    """On the later copy of a parameter that two stages share: the name of the first copy."""
    frozen: bool = False
    block: str = ""
    """Parameters that stand together with the same block, such as a layer, are used together."""
    first_use: int = 0
    """When the forward first uses the parameter: the place of its block among all uses of blocks."""
    last_use: int = 0
    order: int = 0
    """The place of the parameter's first use among those of all parameters, for the order within a block."""

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Slot:
    """One parameter's place in its bucket."""

    name: str
    shape: tuple[int, ...]
    offset: int
    settings: int = 0

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Segment:
    """A part of a bucket, from `start` up to `stop`, that is updated by one settings."""

    settings: int
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """One flat buffer of parameters that live on the same stage."""

    id: int
    stage: int
    slots: tuple[Slot, ...]
    """Those of one settings stand together."""
    numel: int
    """Elements with all padding; a multiple of the number of shards, so that it divides among them."""
    owner: int | None = None
    """By tensors: which rank of the sharding group owns it."""
    tie: str | None = None
    """The first copy's name, for a parameter whose copies on several stages must be summed."""
    tie_stages: tuple[int, ...] = ()
    frozen: bool = False
    """It has no gradient; only its parameters are divided."""
    first_gradient: tuple[int, int] = (0, 0)
    """The last use of any of its parameters in the forward, and the order of that parameter: a backward goes the other
    way, so this gradient is expected first.
    """
    last_gradient: tuple[int, int] = (0, 0)
    """The first use of any of its parameters, and its order: this gradient is expected last."""

    @property
    def first_use(self) -> int:
        return self.last_gradient[0]

    @property
    def last_use(self) -> int:
        return self.first_gradient[0]

    @property
    def counts_in_norm(self) -> bool:
        """A tied parameter is counted on the first stage that holds it, and on no other."""
        return not self.tie_stages or self.stage == self.tie_stages[0]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The runs of slots with one settings; padding belongs to the run before it."""
        runs = [(settings, next(run).offset) for settings, run in groupby(self.slots, key=lambda slot: slot.settings)]
        stops = [*(start for _, start in runs[1:]), self.numel]
        return tuple(Segment(settings, start, stop) for (settings, start), stop in zip(runs, stops, strict=True))


@dataclass(frozen=True)
class ParameterLayout:
    """All buckets of all stages. Bucket ids ascend stage by stage, in the order in which the backward is expected to
    fill them.
    """

    specs: tuple[ParameterSpec, ...]
    buckets: tuple[Bucket, ...]
    ownership: Ownership = Ownership.REPLICATED
    shards: int = 1
    """Ranks that divide the ownership of a bucket."""

    def of_stage(self, stage: int) -> tuple[Bucket, ...]:
        """The buckets of a stage that have gradients."""
        return self._trained_by_stage.get(stage, ())

    def all_of_stage(self, stage: int) -> tuple[Bucket, ...]:
        """With those that are frozen, which the layout knows only where parameters are divided."""
        return self._by_stage.get(stage, ())

    def owned(self, bucket: int, shard: int) -> tuple[int, int]:
        """From where up to where the rank with coordinate `shard` in its sharding group owns the bucket."""
        found = self.buckets[bucket]
        if self.ownership is Ownership.SLICES:
            width = found.numel // self.shards
            return shard * width, (shard + 1) * width
        return (0, found.numel) if found.owner in (None, shard) else (0, 0)

    @cached_property
    def _by_stage(self) -> dict[int, tuple[Bucket, ...]]:
        grouped: dict[int, list[Bucket]] = {}
        for bucket in self.buckets:
            grouped.setdefault(bucket.stage, []).append(bucket)
        return {stage: tuple(buckets) for stage, buckets in grouped.items()}

    @cached_property
    def _trained_by_stage(self) -> dict[int, tuple[Bucket, ...]]:
        return {stage: tuple(b for b in buckets if not b.frozen) for stage, buckets in self._by_stage.items()}


@dataclass
class _Group:
    """The members of a bucket to be."""

    members: list[ParameterSpec]
    owner: int | None = None
    tie: str | None = None


def lay_out(
    specs: Iterable[ParameterSpec],
    *,
    bucket_bytes: int,
    gradient_itemsize: int,
    ownership: Ownership = Ownership.REPLICATED,
    shards: int = 1,
    divide_parameters: bool = False,
) -> ParameterLayout:
    """Assign every trainable parameter to a bucket; with `divide_parameters` every frozen one too.

    A bucket holds parameters of one stage in the reverse of the order in which the forward first uses them (in which
    gradients tend to arrive), up to `bucket_bytes` of gradients; it ends between blocks unless a block is larger. A
    parameter tied across stages, or used again much later in the forward, has a bucket of its own.

    By tensors, parameters go to the rank that owns least so far, the largest of as many as fill a bucket on each rank
    first: ownership is balanced, and a bucket still fills early in the backward.
    """
    specs = tuple(specs)
    limit = max(1, bucket_bytes // gradient_itemsize)
    ties = _stages_of_ties(specs)
    by_tensors = ownership is Ownership.TENSORS
    owner_of_tie = {name: index % shards for index, name in enumerate(ties)} if by_tensors else {}
    buckets: list[Bucket] = []
    for stage in sorted({spec.stage for spec in specs}):
        order = {s.name: (*_first(s), index) for index, s in enumerate(specs) if s.stage == stage}
        groups: list[_Group] = []
        for frozen in (False, True) if divide_parameters else (False,):
            chosen = [spec for spec in specs if spec.stage == stage and spec.frozen == frozen]
            chosen.sort(key=lambda spec: order[spec.name], reverse=True)
            tied = {spec.name: name for spec in chosen if (name := spec.tied_to or spec.name) in ties}
            alone = [s for s in chosen if s.name in tied or s.last_use > s.first_use]
            groups += [_Group([s], owner_of_tie.get(tied.get(s.name, "")), tied.get(s.name)) for s in alone]
            if by_tensors:
                _own_balanced(groups, [s for s in chosen if s not in alone], limit, shards)
            else:
                groups += [_Group(members) for members in _fill([s for s in chosen if s not in alone], limit)]
        # A bucket is full when its last gradient arrives: that of the parameter used first.
        groups.sort(key=lambda group: min(order[spec.name] for spec in group.members), reverse=True)
        granule = ALIGNMENT * (shards if ownership is Ownership.SLICES else 1)
        buckets += [
            _bucket(len(buckets) + index, stage, group, granule, ties.get(group.tie or "", ()))
            for index, group in enumerate(groups)
        ]
    return ParameterLayout(specs, tuple(buckets), ownership, shards)


def _stages_of_ties(specs: Sequence[ParameterSpec]) -> dict[str, tuple[int, ...]]:
    stages: dict[str, set[int]] = {}
    owners = {spec.name: spec for spec in specs if spec.tied_to is None}
    for spec in specs:
        if spec.tied_to is not None and not spec.frozen:
            stages.setdefault(spec.tied_to, {owners[spec.tied_to].stage}).add(spec.stage)
    return {name: tuple(sorted(held)) for name, held in stages.items()}


def _fill(specs: Sequence[ParameterSpec], limit: int) -> Iterator[list[ParameterSpec]]:
    """Runs of at most `limit` elements, which end between blocks where that is possible."""
    run: list[ParameterSpec] = []
    for block in _blocks(specs):
        if run and _extent(run + block) > limit:
            yield run
            run = []
        for spec in block:
            if run and _extent(run) + spec.numel > limit:
                yield run
                run = []
            run = [*run, spec]
    if run:
        yield run


def _own_balanced(groups: list[_Group], specs: Sequence[ParameterSpec], limit: int, shards: int) -> None:
    """Append groups of one owner each, drawn from windows of consecutive parameters."""
    load = [sum(_extent(group.members) for group in groups if group.owner == shard) for shard in range(shards)]
    for group in groups:  # Those that stand alone without being tied.
        if group.owner is None:
            group.owner = load.index(min(load))
            load[group.owner] += _extent(group.members)
    for window in _fill(specs, limit * shards):
        owned: dict[int, list[ParameterSpec]] = {}
        for spec in sorted(window, key=lambda spec: spec.numel, reverse=True):
            owner = load.index(min(load))
            load[owner] += _aligned(spec.numel)
            owned.setdefault(owner, []).append(spec)
        for owner, members in owned.items():
            members.sort(key=window.index)
            groups += [_Group(run, owner) for run in _fill(members, limit)]


def _blocks(specs: Iterable[ParameterSpec]) -> Iterator[list[ParameterSpec]]:
    """Runs of parameters of one block; a parameter without a block is one by itself."""
    for name, run in groupby(specs, key=lambda spec: spec.block):
        members = list(run)
        yield from [members] if name else [[spec] for spec in members]


def _bucket(id: int, stage: int, group: _Group, granule: int, tie_stages: tuple[int, ...]) -> Bucket:
    slots, offset = [], 0
    for spec in sorted(group.members, key=lambda spec: spec.settings):
        slots.append(Slot(spec.name, spec.shape, offset, spec.settings))
        offset += _aligned(spec.numel)
    return Bucket(
        id,
        stage,
        tuple(slots),
        numel=-(-offset // granule) * granule,
        owner=group.owner,
        tie=group.tie,
        tie_stages=tie_stages,
        frozen=group.members[0].frozen,
        first_gradient=max((spec.last_use, spec.order) for spec in group.members),
        last_gradient=min(_first(spec) for spec in group.members),
    )


def _first(spec: ParameterSpec) -> tuple[int, int]:
    return spec.first_use, spec.order


def _extent(specs: Iterable[ParameterSpec]) -> int:
    return sum(_aligned(spec.numel) for spec in specs)


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT
