"""The life of a gradient: what is written where, reduced over what, scaled by what, and read by whom."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from syncline.program.actions import (
    AccumulateShard,
    Action,
    AllocateGradients,
    CheckFinite,
    ClipGradients,
    Computation,
    FreeGradients,
    OptimizerStep,
    Part,
    ReduceGradients,
    ReduceReplicated,
    ScaleGradients,
    ScaleLoss,
    WaitReduce,
    ZeroGradients,
)
from syncline.program.interpreter import Collective
from syncline.program.scales import Factor
from syncline.program.verification.state import BucketState, Content, RankState, StorageState, Violation
from syncline.program.verification.world import Rules, Snapshot, World, require_same_content
from syncline.strategy import DIVIDING_AXES, Ownership
from syncline.strategy.topology import REPLICA_AXES

REDUCTION = {Ownership.SLICES: "reduce_scatter", Ownership.TENSORS: "reduce"}


class GradientRules:
    """Storage, reductions, and what the optimizer must find."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._program = world.program
        degrees = world.program.topology.degrees
        self._target = world.value(world.program.target)
        self._axes = frozenset(axis for axis in REPLICA_AXES if degrees[axis] > 1)
        """Over all of which a gradient must be reduced."""
        self._ownership = world.program.layout.ownership
        self._scales_losses = any(
            "loss_scale" in dict(action.scale.powers)
            for actions in world.program.ranks
            for action in actions
            if isinstance(action, ScaleLoss)
        )

    @property
    def rules(self) -> Rules:
        return Rules(
            perform={
                AllocateGradients: self._allocate,
                AccumulateShard: self._accumulate_shard,
                ScaleGradients: self._scale,
                ZeroGradients: self._zero,
                FreeGradients: self._free,
                CheckFinite: self._look_for_overflow,
                OptimizerStep: self._optimizer_step,
            },
            join={
                ReduceGradients: self._start_reduction,
                ReduceReplicated: self._put_in_copies,
                ClipGradients: self._put_in_norm,
            },
            complete={
                WaitReduce: self._reduce,
                ReduceReplicated: self._sum_copies,
                ClipGradients: self._clip,
            },
        )

    def start(self, rank: RankState) -> None:
        """What a rank holds when a step begins."""
        kept = self._program.kept_storages(rank.number)
        for bucket, part in self._program.storages(rank.number):
            state = rank.buckets.setdefault(bucket, BucketState({}))
            live = (bucket, part) in kept
            state.parts[part] = StorageState(live)
            rank.held_bytes += self._program.storage_bytes(rank.number, bucket, part) if live else 0
        rank.peak_bytes = rank.held_bytes

    def require_at_end(self, rank: RankState) -> None:
        def broken(rule: int, what: str) -> Violation:
            return Violation(rule, rank.number, None, what)

        kept = self._program.kept_storages(rank.number)
        for id, bucket in rank.buckets.items():
            if bucket.in_flight is not None:
                raise broken(3, f"the reduction of bucket {id} is never waited for")
            if self._world.updates and not bucket.consumed and self._program.owns(rank.number, id):
                raise broken(2, f"bucket {id} never reaches an optimizer step")
            for part, storage in bucket.parts.items():
                if storage.contents:
                    raise broken(3, f"{part.value} {id} carries this step's gradient into the next")
                if storage.live != ((id, part) in kept):
                    raise broken(3, f"{part.value} {id} is {'leaked' if storage.live else 'missing in the next step'}")
        if self._scales_losses and not rank.looked_for_overflow:
            raise broken(3, "losses are scaled up, and no overflow has been looked for")
        declared = self._program.peak_gradient_bytes
        if declared and declared[rank.number] != rank.peak_bytes:
            raise broken(
                6, f"{rank.peak_bytes} bytes of gradients are alive at once, {declared[rank.number]} were declared"
            )

    def write(self, rank: RankState, backward: Computation, seed: Fraction) -> None:
        """A backward adds its gradients to every bucket of its stage; to one that is allocated during it, as soon as
        that is done.
        """
        allocated = {action.bucket for action in self._allocations_during(rank, backward)}
        for bucket in self._program.layout.of_stage(backward.stage):
            if bucket.id in allocated:
                rank.awaited_writes[bucket.id] = (backward, seed)
            else:
                self._write(rank, backward, bucket.id, seed)

    def _allocations_during(self, rank: RankState, backward: Computation) -> Iterator[AllocateGradients]:
        for action in self._program.inside(rank.number, rank.position):
            if isinstance(action, AllocateGradients) and action.part is Part.BUCKET and action.during == backward:
                yield action

    def _write(self, rank: RankState, backward: Computation, id: int, seed: Fraction) -> None:
        bucket = self._usable(rank, backward, id)
        if bucket.consumed:
            raise Violation(3, rank.number, backward, f"bucket {id} was already used by the optimizer")
        # A reduction leaves all that was there in the owned part only, and nothing may be added after it: one tells.
        latest = next(reversed(bucket.whole.contents.values()), None)
        if latest is not None and latest.owned_only:
            raise Violation(
                2, rank.number, backward, f"bucket {id} holds a gradient that is reduced in the owned part only"
            )
        bucket.whole.contents[backward.micro_batch] = Content(seed)

    # ---- Storage -----------------------------------------------------------------------------------------------------

    def _allocate(self, rank: RankState, action: AllocateGradients) -> None:
        storage = self._storage(rank, action, action.bucket, action.part)
        if storage.live:
            raise Violation(6, rank.number, action, f"the {action.part.value} has storage already")
        storage.live = True
        rank.held_bytes += self._program.storage_bytes(rank.number, action.bucket, action.part)
        rank.peak_bytes = max(rank.peak_bytes, rank.held_bytes)
        if action.part is Part.BUCKET and action.bucket in rank.awaited_writes:
            backward, seed = rank.awaited_writes.pop(action.bucket)
            self._write(rank, backward, action.bucket, seed)

    def _zero(self, rank: RankState, action: ZeroGradients) -> None:
        self._usable(rank, action, action.bucket, action.part).parts[action.part].contents.clear()

    def _free(self, rank: RankState, action: FreeGradients) -> None:
        storage = self._usable(rank, action, action.bucket, action.part).parts[action.part]
        storage.contents.clear()
        storage.live = False
        rank.held_bytes -= self._program.storage_bytes(rank.number, action.bucket, action.part)

    def _storage(self, rank: RankState, action: Action, id: int, part: Part) -> StorageState:
        bucket = rank.buckets.get(id)
        if bucket is None:
            raise Violation(3, rank.number, action, f"the rank does not hold bucket {id}")
        if part not in bucket.parts:
            raise Violation(3, rank.number, action, f"bucket {id} has no shard on this rank")
        return bucket.parts[part]

    def _usable(self, rank: RankState, action: Action, id: int, part: Part = Part.BUCKET) -> BucketState:
        if not self._storage(rank, action, id, part).live:
            raise Violation(3, rank.number, action, f"{part.value} {id} has no storage")
        bucket = rank.buckets[id]
        if bucket.in_flight is not None and part is Part.BUCKET:
            raise Violation(3, rank.number, action, f"bucket {id} is being reduced and has not been waited for")
        return bucket

    # ---- Reductions --------------------------------------------------------------------------------------------------

    def _start_reduction(self, rank: RankState, action: ReduceGradients) -> Snapshot:
        bucket = self._usable(rank, action, action.bucket)
        contents = bucket.whole.contents
        axes = self._axes_of(action)
        self._require_kind(rank, action, axes)
        if all(axes <= content.axes for content in contents.values()):
            raise Violation(2, rank.number, action, "the bucket holds nothing that has not been reduced already")
        for micro_batch, content in contents.items():
            if content.owned_only and (axes & content.axes or action.kind != "all_reduce"):
                raise Violation(2, rank.number, action, f"micro-batch {micro_batch} is in the owned part only")
            if axes & content.axes and not axes <= content.axes:
                raise Violation(2, rank.number, action, f"micro-batch {micro_batch} is reduced over some of the group")
        bucket.in_flight = action
        return dict(contents)

    def _require_kind(self, rank: RankState, action: ReduceGradients, axes: frozenset[str]) -> None:
        """A reduction to owners runs as ownership is divided; what follows it runs among owners."""
        if action.kind == "all_reduce":
            contents = rank.buckets[action.bucket].whole.contents.values()
            if self._ownership is not Ownership.REPLICATED and not all(content.owned_only for content in contents):
                raise Violation(2, rank.number, action, "the bucket has not been reduced to its owners before")
            return
        if action.kind != REDUCTION.get(self._ownership) or axes != frozenset(DIVIDING_AXES):
            what = f"gradients are owned by {self._ownership.value}, divided along {' and '.join(DIVIDING_AXES)}"
            raise Violation(2, rank.number, action, what)

    def _reduce(self, rank: RankState, action: WaitReduce, collective: Collective | None) -> None:
        bucket = rank.buckets.get(action.bucket)
        reduction = bucket.in_flight if bucket is not None else None
        if bucket is None or reduction is None or collective is None:
            raise Violation(3, rank.number, action, "no reduction of this bucket has been started")
        require_same_content(rank, collective)
        for micro_batch, content in collective.joined[rank.number][1].items():
            bucket.whole.contents[micro_batch] = self._reduced(content, reduction, len(collective.members))
        if reduction.kind == "reduce" and not self._program.owns(rank.number, action.bucket):
            bucket.whole.contents.clear()
        bucket.in_flight = None

    def _reduced(self, content: Content, reduction: ReduceGradients, members: int) -> Content:
        axes = self._axes_of(reduction)
        known = axes <= content.axes
        # What is reduced already is the same on all members: their sum is that many times it, their average is itself.
        growth = Fraction(members) if known and reduction.op == "sum" else Fraction(1)
        shrinkage = Fraction(members) if not known and reduction.op == "avg" else Fraction(1)
        owned_only = content.owned_only or reduction.kind != "all_reduce"
        return Content(content.coefficient * growth / shrinkage, content.axes | axes, owned_only)

    def _axes_of(self, reduction: ReduceGradients) -> frozenset[str]:
        return frozenset(reduction.group.split("+")) & self._axes

    def _accumulate_shard(self, rank: RankState, action: AccumulateShard) -> None:
        bucket = self._usable(rank, action, action.bucket)
        shard = self._usable(rank, action, action.bucket, Part.SHARD).parts[Part.SHARD]
        for micro_batch, content in bucket.whole.contents.items():
            if not content.owned_only:
                raise Violation(2, rank.number, action, f"micro-batch {micro_batch} has not been reduced to its owner")
            if micro_batch in shard.contents:
                raise Violation(2, rank.number, action, f"micro-batch {micro_batch} is added to the shard twice")
            shard.contents[micro_batch] = content

    def _put_in_copies(self, rank: RankState, action: ReduceReplicated) -> Snapshot:
        bucket = self._readable(rank, action, action.bucket)
        if bucket.copies_summed:
            raise Violation(2, rank.number, action, "the copies have been summed already")
        for copy in self._other_copies(rank, action):
            if self._readable(rank, action, copy).read.contents != bucket.read.contents:
                raise Violation(2, rank.number, action, f"bucket {copy}, a copy on this rank, holds something else")
        return dict(bucket.read.contents)

    def _sum_copies(self, rank: RankState, action: ReduceReplicated, collective: Collective | None) -> None:
        assert collective is not None
        require_same_content(rank, collective)
        for id in (action.bucket, *self._other_copies(rank, action)):
            rank.buckets[id].copies_summed = True

    def _other_copies(self, rank: RankState, action: ReduceReplicated) -> list[int]:
        """The buckets on this rank that hold the same parameter."""
        return [b.id for b in self._program.buckets(rank.number) if b.tie == action.what and b.id != action.bucket]

    # ---- Scales, decisions, updates ----------------------------------------------------------------------------------

    def _scale(self, rank: RankState, action: ScaleGradients) -> None:
        contents = self._readable(rank, action, action.bucket).read.contents
        value = self._world.value(action.scale)
        for micro_batch, content in contents.items():
            contents[micro_batch] = Content(content.coefficient * value, content.axes, content.owned_only)

    def _put_in_norm(self, rank: RankState, action: ClipGradients) -> Snapshot:
        owned = [b for b in self._program.buckets(rank.number) if self._program.owns(rank.number, b.id)]
        expected = {bucket.id for bucket in owned if bucket.counts_in_norm}
        if set(action.buckets) != expected or len(action.buckets) != len(expected):
            raise Violation(2, rank.number, action, f"the norm must count the buckets {sorted(expected)} once")
        divided = self._ownership is not Ownership.REPLICATED
        parts = self._program.topology.group(rank.number, ("pp", *DIVIDING_AXES) if divided else ("pp",))
        if self._program.members(rank.number, action.group) != parts:
            raise Violation(2, rank.number, action, f"the norm must join the parts on ranks {parts}")
        for bucket in owned:
            self._require_complete(rank, action, bucket.id, action.scale)
        return {}

    def _clip(self, rank: RankState, action: ClipGradients, collective: Collective | None) -> None:
        rank.clipped = True

    def _look_for_overflow(self, rank: RankState, action: CheckFinite) -> None:
        if not rank.clipped:
            raise Violation(3, rank.number, action, "it reads the norm, which has not been computed")
        rank.looked_for_overflow = True

    def _optimizer_step(self, rank: RankState, action: OptimizerStep) -> None:
        if not self._program.owns(rank.number, action.bucket):
            raise Violation(2, rank.number, action, "the rank owns nothing of this bucket")
        if self._scales_losses and not rank.looked_for_overflow:
            raise Violation(3, rank.number, action, "losses are scaled up, and no overflow has been looked for")
        self._require_complete(rank, action, action.bucket, action.scale)
        if rank.buckets[action.bucket].consumed:
            raise Violation(2, rank.number, action, "the bucket is used for a second update")
        rank.buckets[action.bucket].consumed = True

    def _require_complete(self, rank: RankState, action: Action, id: int, scale: Factor) -> None:
        bucket = self._readable(rank, action, id)
        contents = bucket.read.contents
        missing = set(range(self._program.micro_batches)) - set(contents)
        if missing:
            raise Violation(2, rank.number, action, f"bucket {id} lacks micro-batches {sorted(missing)}")
        for micro_batch, content in contents.items():
            if content.axes != self._axes:
                unreduced = ", ".join(sorted(self._axes - content.axes))
                what = f"micro-batch {micro_batch} of bucket {id} was not reduced over {unreduced}"
                raise Violation(2, rank.number, action, what)
        if self._program.bucket(id).tie is not None and not bucket.copies_summed:
            raise Violation(2, rank.number, action, f"the copies of bucket {id} on other stages are not in it")
        expected = self._target / self._world.value(scale)
        for micro_batch, content in contents.items():
            if content.coefficient != expected:
                times = content.coefficient / expected
                what = f"micro-batch {micro_batch} of bucket {id} is {times} times what it must be"
                raise Violation(5, rank.number, action, what)

    def _readable(self, rank: RankState, action: Action, id: int) -> BucketState:
        """The bucket, with storage where the optimizer reads its gradient."""
        bucket = rank.buckets.get(id)
        return self._usable(rank, action, id, Part.SHARD if bucket and Part.SHARD in bucket.parts else Part.BUCKET)
