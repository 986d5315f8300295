"""Proves a program correct before anything runs, for all ranks at once.

The six rules:

1. Every receive has its send, in an order that cannot deadlock.
2. Every parameter's gradient of every micro-batch is inside exactly one reduction per group that needs it.
3. No read before its wait, no write between start and wait, no use after free, nothing leaked at the end.
4. Collectives are issued in the same order by every member of their group.
5. The product of all scales on the path of a gradient is exactly the target.
6. Gradient storage by liveness peaks at what the program declares, one storage per bucket.

The proof is an abstract run: every rank executes its list on symbolic gradients. A bucket's content is, for every
micro-batch, a coefficient (an exact fraction) and whether it already covers all replicas. Averages, sums, scales act on
coefficients; when the optimizer reads the bucket, every micro-batch must be there once, cover every replica and carry
exactly the target.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from syncline.program.abstract_state import (
    Blocked,
    BucketState,
    Content,
    RankState,
    Violation,
)
from syncline.program.actions import (
    Action,
    AllocateGradients,
    Backward,
    ClipGradients,
    CountTokens,
    Forward,
    FreeGradients,
    OptimizerStep,
    PointToPoint,
    ReceiveActivation,
    ReceiveGradient,
    ReduceGradients,
    ReduceLoss,
    ReduceReplicated,
    ScaleGradients,
    ScaleLoss,
    SendActivation,
    SendGradient,
    WaitReduce,
    ZeroGradients,
)
from syncline.program.factors import Factor
from syncline.program.meetings import Meetings
from syncline.program.program import MESSAGES_IN_FLIGHT, Program


@dataclass(frozen=True)
class Verified:
    """What the abstract run found out on the way."""

    peak_gradient_bytes: tuple[int, ...]


def verify(program: Program) -> Verified:
    """Run the program abstractly on all ranks.

    Raises:
        Violation: the first rule found broken.
    """
    return _AbstractRun(program).run()


class _AbstractRun:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.quantities = {
            # Large primes for what only a run knows: a product of scales that has one factor too many cannot equal the
            # target by chance. The other two are the program's own.
            "tokens": Fraction(1_000_003),
            "micro_batch_tokens": Fraction(10_007),
            "accumulation": Fraction(program.micro_batches),
            "replicas": Fraction(program.topology.replicas),
        }
        self.target = self.value(program.target)
        self.ranks = [self._start(rank) for rank in range(program.topology.world_size)]
        self.channels: dict[tuple[int, int, str], deque[tuple[PointToPoint, Fraction]]] = defaultdict(deque)
        self.meetings = Meetings(program)
        self.handlers: dict[type[Action], Callable[[RankState, Action], None]] = {
            CountTokens: self.blocking_collective,
            ReduceLoss: self.blocking_collective,
            ClipGradients: self.clip,
            Forward: self.forward,
            ScaleLoss: self.scale_loss,
            Backward: self.backward,
            SendActivation: self.send,
            SendGradient: self.send,
            ReceiveActivation: self.receive,
            ReceiveGradient: self.receive,
            AllocateGradients: self.allocate,
            ReduceGradients: self.start_reduction,
            WaitReduce: self.wait,
            ScaleGradients: self.scale_gradients,
            ReduceReplicated: self.sum_copies,
            OptimizerStep: self.optimizer_step,
            ZeroGradients: self.zero,
            FreeGradients: self.free,
        }

    # ---- The run -----------------------------------------------------------------------------------------------------

    def run(self) -> Verified:
        moved = True
        while moved:
            moved = False
            for rank in self.ranks:
                moved |= self._advance(rank)
        for rank in self.ranks:
            actions = self.program.ranks[rank.number]
            if rank.position < len(actions):
                action = actions[rank.position]
                raise Violation(self._rule_of_wait(action), rank.number, action, "it waits for ever")
        for rank in self.ranks:
            self._check_end(rank)
        return Verified(tuple(rank.peak_bytes for rank in self.ranks))

    def _advance(self, rank: RankState) -> bool:
        actions = self.program.ranks[rank.number]
        before = rank.position
        while rank.position < len(actions):
            action = actions[rank.position]
            self._check_during(rank, action)
            try:
                self.handlers[type(action)](rank, action)
            except Blocked:
                break
            rank.position += 1
        return rank.position != before

    def _start(self, number: int) -> RankState:
        rank = RankState(number)
        released = self.program.released_buckets(number)
        for bucket in self.program.buckets(number):
            live = bucket.id not in released
            rank.buckets[bucket.id] = BucketState(live)
            rank.held_bytes += self.program.gradient_bytes(bucket.id) if live else 0
        rank.peak_bytes = rank.held_bytes
        return rank

    @staticmethod
    def _rule_of_wait(action: Action) -> int:
        return 1 if isinstance(action, PointToPoint) else 4

    def _check_during(self, rank: RankState, action: Action) -> None:
        """What happens during a backward stands right behind it, so that nothing is issued in between."""
        during = getattr(action, "during", None)
        if during is not None and during not in rank.inside:
            raise Violation(
                4, rank.number, action, "it does not stand right behind the backward during which it happens"
            )
        if during is None:
            rank.inside = [action] if isinstance(action, Backward) else []

    def _check_end(self, rank: RankState) -> None:
        def broken(rule: int, what: str) -> Violation:
            return Violation(rule, rank.number, None, what)

        for (source, destination, direction), waiting in self.channels.items():
            if waiting and destination == rank.number:
                raise broken(
                    1, f"{direction} of micro-batch {waiting[0][0].micro_batch} from rank {source} is never received"
                )
        for stage, micro_batch in sorted(rank.forwards - rank.backwards):
            if rank.backwards or rank.buckets:
                raise broken(3, f"the activations of stage {stage}, micro-batch {micro_batch} are never used")
        released = self.program.released_buckets(rank.number)
        for id, bucket in rank.buckets.items():
            if bucket.in_flight is not None:
                raise broken(3, f"the reduction of bucket {id} is never waited for")
            if not bucket.consumed:
                raise broken(2, f"bucket {id} never reaches an optimizer step")
            if bucket.contents:
                raise broken(3, f"bucket {id} carries this step's gradient into the next")
            if bucket.live == (id in released):
                raise broken(3, f"bucket {id} is {'leaked' if bucket.live else 'missing in the next step'}")
        declared = self.program.peak_gradient_bytes
        if declared and declared[rank.number] != rank.peak_bytes:
            raise broken(
                6, f"{rank.peak_bytes} bytes of gradients are alive at once, {declared[rank.number]} were declared"
            )

    def value(self, factor: Factor) -> Fraction:
        return factor.evaluate(self.quantities, Fraction(1))

    # ---- Compute and messages ----------------------------------------------------------------------------------------

    def forward(self, rank: RankState, action: Action) -> None:
        assert isinstance(action, Forward)
        key = (action.stage, action.micro_batch)
        if action.stage > 0 and key not in rank.activations:
            raise Violation(3, rank.number, action, "its activation has not been received")
        rank.forwards.add(key)

    def scale_loss(self, rank: RankState, action: Action) -> None:
        assert isinstance(action, ScaleLoss)
        if (action.stage, action.micro_batch) in rank.backwards:
            raise Violation(5, rank.number, action, "the backward has already been seeded")
        seed = rank.seeds.get(action.micro_batch, Fraction(1))
        rank.seeds[action.micro_batch] = seed * self.value(action.scale)

    def backward(self, rank: RankState, action: Action) -> None:
        assert isinstance(action, Backward)
        key = (action.stage, action.micro_batch)
        if key not in rank.forwards:
            raise Violation(3, rank.number, action, "it comes before its forward")
        if action.stage == self.program.last_stage:
            seed = rank.seeds.get(action.micro_batch, Fraction(1))
        elif key in rank.gradients:
            seed = rank.gradients[key]
        else:
            raise Violation(3, rank.number, action, "the gradient of its output has not been received")
        if key in rank.backwards:
            raise Violation(2, rank.number, action, "the same gradient is added twice")
        rank.backwards.add(key)
        self._allocate_during(rank, action)
        for bucket in self.program.layout.of_stage(action.stage):
            held = self._usable(rank, action, bucket.id)
            if held.consumed:
                raise Violation(3, rank.number, action, f"bucket {bucket.id} was already used by the optimizer")
            held.contents[action.micro_batch] = Content(seed, self.program.topology.replicas == 1)

    def _allocate_during(self, rank: RankState, backward: Backward) -> None:
        for action in self.program.ranks[rank.number][rank.position + 1 :]:
            if getattr(action, "during", None) != backward:
                break
            if isinstance(action, AllocateGradients):
                self._give_storage(rank, action)

    def send(self, rank: RankState, action: Action) -> None:
        assert isinstance(action, PointToPoint)
        done = rank.forwards if isinstance(action, SendActivation) else rank.backwards
        if (action.stage, action.micro_batch) not in done:
            raise Violation(3, rank.number, action, "what it sends has not been computed")
        channel = self.channels[rank.number, action.peer, action.direction]
        if len(channel) >= MESSAGES_IN_FLIGHT:
            raise Blocked
        seed = Fraction(1)
        if isinstance(action, SendGradient):
            on_last = action.stage == self.program.last_stage
            seed = (
                rank.seeds.get(action.micro_batch, Fraction(1))
                if on_last
                else rank.gradients[action.stage, action.micro_batch]
            )
        channel.append((action, seed))

    def receive(self, rank: RankState, action: Action) -> None:
        assert isinstance(action, PointToPoint)
        channel = self.channels[action.peer, rank.number, action.direction]
        if not channel:
            raise Blocked
        sent, seed = channel.popleft()
        step = 1 if action.direction == "activation" else -1
        if (sent.stage + step, sent.micro_batch) != (action.stage, action.micro_batch):
            raise Violation(1, rank.number, action, f"what rank {action.peer} sends next is {sent}")
        key = (action.stage, action.micro_batch)
        if isinstance(action, ReceiveActivation):
            rank.activations.add(key)
        else:
            rank.gradients[key] = seed

    # ---- Storage -----------------------------------------------------------------------------------------------------

    def allocate(self, rank: RankState, action: Action) -> None:
        assert isinstance(action, AllocateGradients)
        if action.during is None:
            self._give_storage(rank, action)

    def _give_storage(self, rank: RankState, action: AllocateGradients) -> None:
        bucket = rank.buckets.get(action.bucket)
        if bucket is None:
            raise Violation(3, rank.number, action, "the rank does not hold this bucket")
        if bucket.live:
            raise Violation(6, rank.number, action, "the bucket has storage already")
        bucket.live = True
        rank.held_bytes += self.program.gradient_bytes(action.bucket)
        rank.peak_bytes = max(rank.peak_bytes, rank.held_bytes)

    def zero(self, rank: RankState, action: Action) -> None:
        assert isinstance(action, ZeroGradients)
        self._usable(rank, action, action.bucket).contents.clear()

    def free(self, rank: RankState, action: Action) -> None:
        assert isinstance(action, FreeGradients)
        bucket = self._usable(rank, action, action.bucket)
        bucket.contents.clear()
        bucket.live = False
        rank.held_bytes -= self.program.gradient_bytes(action.bucket)

    def _usable(self, rank: RankState, action: Action, id: int) -> BucketState:
        bucket = rank.buckets.get(id)
        if bucket is None:
            raise Violation(3, rank.number, action, f"the rank does not hold bucket {id}")
        if not bucket.live:
            raise Violation(3, rank.number, action, f"bucket {id} has no storage")
        if bucket.in_flight is not None:
            raise Violation(3, rank.number, action, f"bucket {id} is being reduced and has not been waited for")
        return bucket

    # ---- Collectives -------------------------------------------------------------------------------------------------

    def start_reduction(self, rank: RankState, action: Action) -> None:
        assert isinstance(action, ReduceGradients)
        bucket = self._usable(rank, action, action.bucket)
        if all(content.reduced for content in bucket.contents.values()):
            raise Violation(2, rank.number, action, "the bucket holds nothing that has not been reduced already")
        bucket.in_flight = self.meetings.issue(rank, action, dict(bucket.contents))

    def wait(self, rank: RankState, action: Action) -> None:
        assert isinstance(action, WaitReduce)
        bucket = rank.buckets.get(action.bucket)
        collective = bucket.in_flight if bucket is not None else None
        if bucket is None or collective is None:
            raise Violation(3, rank.number, action, "no reduction of this bucket has been started")
        self.meetings.wait_for(collective)
        reduction = collective.action
        assert isinstance(reduction, ReduceGradients)
        members = Fraction(len(collective.group))
        self.meetings.check_alike(rank, collective)
        for micro_batch, content in collective.snapshot.items():
            # A reduced gradient is the same on all members: their sum is that many times it, their average is itself.
            growth = members if content.reduced and reduction.op == "sum" else Fraction(1)
            shrinkage = members if not content.reduced and reduction.op == "avg" else Fraction(1)
            bucket.contents[micro_batch] = Content(content.coefficient * growth / shrinkage, True)
        bucket.in_flight = None

    def sum_copies(self, rank: RankState, action: Action) -> None:
        assert isinstance(action, ReduceReplicated)
        bucket = self._usable(rank, action, action.bucket)
        if bucket.copies_summed:
            raise Violation(2, rank.number, action, "the copies have been summed already")
        self.blocking_collective(rank, action, bucket.contents)
        bucket.copies_summed = True

    def scale_gradients(self, rank: RankState, action: Action) -> None:
        assert isinstance(action, ScaleGradients)
        bucket = self._usable(rank, action, action.bucket)
        value = self.value(action.scale)
        for micro_batch, content in bucket.contents.items():
            bucket.contents[micro_batch] = Content(content.coefficient * value, content.reduced)

    def clip(self, rank: RankState, action: Action) -> None:
        assert isinstance(action, ClipGradients)
        expected = {bucket.id for bucket in self.program.buckets(rank.number) if bucket.counts_in_norm}
        if set(action.buckets) != expected or len(action.buckets) != len(expected):
            raise Violation(2, rank.number, action, f"the norm must count the buckets {sorted(expected)} once")
        for id in rank.buckets:
            self._check_complete(rank, action, id, action.scale)
        self.blocking_collective(rank, action)

    def optimizer_step(self, rank: RankState, action: Action) -> None:
        assert isinstance(action, OptimizerStep)
        self._check_complete(rank, action, action.bucket, action.scale)
        if rank.buckets[action.bucket].consumed:
            raise Violation(2, rank.number, action, "the bucket is used for a second update")
        rank.buckets[action.bucket].consumed = True

    def _check_complete(self, rank: RankState, action: Action, id: int, scale: Factor) -> None:
        bucket = self._usable(rank, action, id)
        missing = set(range(self.program.micro_batches)) - set(bucket.contents)
        if missing:
            raise Violation(2, rank.number, action, f"bucket {id} lacks micro-batches {sorted(missing)}")
        for micro_batch, content in bucket.contents.items():
            if not content.reduced:
                raise Violation(2, rank.number, action, f"micro-batch {micro_batch} of bucket {id} was not reduced")
        if self.program.bucket(id).tie is not None and not bucket.copies_summed:
            raise Violation(2, rank.number, action, f"the copies of bucket {id} on other stages are not in it")
        for micro_batch, content in bucket.contents.items():
            product = content.coefficient * self.value(scale)
            if product != self.target:
                what = f"micro-batch {micro_batch} of bucket {id} is {product / self.target} times what it must be"
                raise Violation(5, rank.number, action, what)

    def blocking_collective(self, rank: RankState, action: Action, snapshot: dict[int, Content] | None = None) -> None:
        if rank.blocked_in is None:
            rank.blocked_in = self.meetings.issue(rank, action, dict(snapshot or {}))
        collective = rank.blocked_in
        self.meetings.wait_for(collective)
        rank.blocked_in = None
        self.meetings.check_alike(rank, collective)
