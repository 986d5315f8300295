"""The program of one optimizer step: every rank's list of actions, and what is needed to read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from syncline.program.actions import AccumulateShard, Action, AllocateGradients, BackwardInput, Part
from syncline.program.layout import Bucket, ParameterLayout
from syncline.program.scales import Factor
from syncline.schedules.placement import Placement
from syncline.strategy.topology import AXES, Topology


@dataclass(frozen=True)
class Sizes:
    """Bytes of what the program moves and holds."""

    gradient_itemsize: int = 4
    reduce_itemsize: int = 4
    parameter_itemsize: int = 4
    activation_bytes: int = 0
    """One micro-batch's hidden states between two stages; its gradient has the same size."""


@dataclass(frozen=True)
class Program:
    """One step on all ranks. Passes turn a program into another; they never change one in place."""

    topology: Topology
    placement: Placement
    layout: ParameterLayout
    micro_batches: int
    target: Factor
    """What every gradient must have been multiplied by when the optimizer reads it."""
    sizes: Sizes
    ranks: tuple[tuple[Action, ...], ...]
    messages_in_flight: int = 2
    """How many messages a rank may have sent to another in one direction before the first must have been received."""
    peak_gradient_bytes: tuple[int, ...] = ()
    """Per rank, by liveness; filled in by the builder once the last pass has run, and checked by the verifier."""
    peak_gathered_bytes: tuple[int, ...] = ()
    """The same for the parameters that are gathered from others and freed again."""

    def stages(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, in the order of the model."""
        return self.placement.stages_at(self.topology.position(rank))

    @property
    def last_stage(self) -> int:
        return self.placement.last_stage

    def holder(self, rank: int, stage: int) -> int:
        """The rank that holds `stage` in the pipeline of `rank`."""
        return self.topology.neighbour(rank, pp=self.placement.position(stage))

    def buckets(self, rank: int) -> tuple[Bucket, ...]:
        """The buckets of gradients that `rank` holds."""
        return tuple(bucket for stage in self.stages(rank) for bucket in self.layout.of_stage(stage))

    def parameter_buckets(self, rank: int) -> tuple[Bucket, ...]:
        """The buckets of parameters that `rank` holds: with those that are frozen, where parameters are divided."""
        return tuple(bucket for stage in self.stages(rank) for bucket in self.layout.all_of_stage(stage))

    def bucket(self, id: int) -> Bucket:
        return self.layout.buckets[id]

    def owned(self, rank: int, bucket: int) -> tuple[int, int]:
        """From where up to where, in elements, `rank` owns the bucket; empty when it owns nothing of it."""
        return self.layout.owned(bucket, self.topology.coordinate(rank)["sharding"])

    def owns(self, rank: int, bucket: int) -> bool:
        start, stop = self.owned(rank, bucket)
        return stop > start

    def gradient_bytes(self, bucket: int) -> int:
        return self.layout.buckets[bucket].numel * self.sizes.gradient_itemsize

    def storage_bytes(self, rank: int, bucket: int, part: Part) -> int:
        """Bytes of a bucket's gradient storage on `rank`, or of its shard's."""
        if part is Part.BUCKET:
            return self.gradient_bytes(bucket)
        start, stop = self.owned(rank, bucket)
        return (stop - start) * self.sizes.gradient_itemsize

    def parameter_bytes(self, bucket: int) -> int:
        return self.layout.buckets[bucket].numel * self.sizes.parameter_itemsize

    def members(self, rank: int, group: str) -> tuple[int, ...]:
        """The global ranks, ascending, of the group of that name in which `rank` is."""
        if group == "world":
            return tuple(range(self.topology.world_size))
        if group.startswith("tied:"):
            stages = (int(stage) for stage in group.removeprefix("tied:").split(","))
            return tuple(sorted({self.holder(rank, stage) for stage in stages}))
        axes = tuple(group.split("+"))
        assert set(axes) <= set(AXES), f"unknown group {group}"
        return self.topology.group(rank, axes)

    @property
    def halves_backwards(self) -> bool:
        return any(isinstance(action, BackwardInput) for actions in self.ranks for action in actions)

    def inside(self, rank: int, position: int) -> Iterator[Action]:
        """What happens during the computation at `position` in the list of `rank`: it stands right behind it."""
        actions = self.ranks[rank]
        for index in range(position + 1, len(actions)):
            if getattr(actions[index], "during", None) is None:
                return
            yield actions[index]

    def storages(self, rank: int) -> frozenset[tuple[int, Part]]:
        """The gradient storages of which `rank`'s actions make use."""
        whole = {(bucket.id, Part.BUCKET) for bucket in self.buckets(rank)}
        return frozenset(whole | {(a.bucket, Part.SHARD) for a in self.ranks[rank] if isinstance(a, AccumulateShard)})

    def kept_storages(self, rank: int) -> frozenset[tuple[int, Part]]:
        """Those that no action allocates: they live from step to step."""
        allocated = {(a.bucket, a.part) for a in self.ranks[rank] if isinstance(a, AllocateGradients)}
        return self.storages(rank) - allocated

    def shards_of(self, rank: int) -> frozenset[int]:
        """The buckets whose gradient the optimizer reads from their shard."""
        return frozenset(bucket for bucket, part in self.storages(rank) if part is Part.SHARD)

    def map_ranks(self, change: Callable[[int, Sequence[Action]], Sequence[Action]]) -> Program:
        """The program in which each rank's actions are `change(rank, actions)`."""
        return replace(self, ranks=tuple(tuple(change(rank, actions)) for rank, actions in enumerate(self.ranks)))
