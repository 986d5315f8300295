"""Where every parameter lives: its stage, its bucket, its offset. Computed once, asked by everyone.

A *bucket* is one flat buffer. Parameters, gradients, optimizer state of a bucket share its offsets, so that a bucket is
reduced by one collective and updated by one fused optimizer call. Offsets are counted in elements, not bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

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
    decay: bool
    """Weight decay applies."""
    tied_to: str | None = None
    """On the later copy of a parameter that two stages share: the name of the first copy."""
    frozen: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Slot:
    """One parameter's place in its bucket."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """One flat buffer of parameters that live on the same stage and are updated alike."""

    id: int
    stage: int
    slots: tuple[Slot, ...]
    numel: int
    """Elements with all padding; a multiple of the number of replicas, so that it divides among them."""
    decay: bool
    tie: str | None = None
    """The first copy's name, for a parameter whose copies on several stages must be summed."""
    tie_stages: tuple[int, ...] = ()

    @property
    def counts_in_norm(self) -> bool:
        """A tied parameter is counted on the first stage that holds it, and on no other."""
        return not self.tie_stages or self.stage == self.tie_stages[0]


@dataclass(frozen=True)
class ParameterLayout:
    """All buckets of all stages. Bucket ids ascend stage by stage, in the order in which the backward is expected to
    fill them.
    """

    specs: tuple[ParameterSpec, ...]
    buckets: tuple[Bucket, ...]

    def of_stage(self, stage: int) -> tuple[Bucket, ...]:
        return self._by_stage.get(stage, ())

    @cached_property
    def _by_stage(self) -> dict[int, tuple[Bucket, ...]]:
        grouped: dict[int, list[Bucket]] = {}
        for bucket in self.buckets:
            grouped.setdefault(bucket.stage, []).append(bucket)
        return {stage: tuple(buckets) for stage, buckets in grouped.items()}


def lay_out(
    specs: Iterable[ParameterSpec], *, bucket_bytes: int, gradient_itemsize: int, replicas: int
) -> ParameterLayout:
    """Assign every trainable parameter to a bucket.

    A bucket holds parameters of one stage, all with or all without weight decay, in the reverse of their registration
    order (in which gradients tend to arrive), up to `bucket_bytes` of gradients. A parameter tied across stages has a
    bucket of its own, so that its copies can be summed by one collective.
    """
    specs = tuple(specs)
    limit = max(1, bucket_bytes // gradient_itemsize)
    ties = _stages_of_ties(specs)
    buckets: list[Bucket] = []
    for stage in sorted({spec.stage for spec in specs}):
        open_groups: dict[bool, list[ParameterSpec]] = {}
        closed: list[tuple[list[ParameterSpec], str | None]] = []
        for spec in reversed([spec for spec in specs if spec.stage == stage and not spec.frozen]):
            tie = spec.tied_to or spec.name
            if tie in ties:
                closed.append(([spec], tie))
                continue
            group = open_groups.get(spec.decay)
            if group and _aligned(sum(_aligned(member.numel) for member in group)) + spec.numel > limit:
                closed.append((group, None))
                group = None
            if group is None:
                group = open_groups[spec.decay] = []
            group.append(spec)
        closed.extend((group, None) for group in open_groups.values())
        # A bucket is full when its last gradient arrives: that of the parameter registered first.
        closed.sort(key=lambda group: specs.index(group[0][-1]), reverse=True)
        for members, tie_name in closed:
            tie_stages = ties[tie_name] if tie_name else ()
            buckets.append(_bucket(len(buckets), stage, members, replicas, tie_name, tie_stages))
    return ParameterLayout(specs, tuple(buckets))


def _stages_of_ties(specs: Sequence[ParameterSpec]) -> dict[str, tuple[int, ...]]:
    stages: dict[str, set[int]] = {}
    owners = {spec.name: spec for spec in specs if spec.tied_to is None}
    for spec in specs:
        if spec.tied_to is not None and not spec.frozen:
            stages.setdefault(spec.tied_to, {owners[spec.tied_to].stage}).add(spec.stage)
    return {name: tuple(sorted(held)) for name, held in stages.items()}


def _bucket(
    id: int,
    stage: int,
    members: Sequence[ParameterSpec],
    replicas: int,
    tie: str | None,
    tie_stages: tuple[int, ...],
) -> Bucket:
    slots, offset = [], 0
    for spec in members:
        slots.append(Slot(spec.name, spec.shape, offset))
        offset += _aligned(spec.numel)
    granule = ALIGNMENT * replicas
    numel = -(-offset // granule) * granule
    return Bucket(id, stage, tuple(slots), numel, members[0].decay, tie, tie_stages)


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT
