"""The decisions that shape a step's program: immutable and final. Nothing here knows how a user writes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from syncline.schedules import V_SHAPED
from syncline.schedules.placement import Placement
from syncline.strategy.topology import Topology


class SyncMoment(str, Enum):
    """When the gradients of one step are reduced across replicas."""

    EVERY_MICRO_BATCH = "every_micro_batch"
    LAST_MICRO_BATCH = "last_micro_batch"
    AFTER_ACCUMULATION = "after_accumulation"


class Normalization(str, Enum):
    """What the sum of token losses is divided by."""

    TOKENS = "tokens"
    """The number of valid tokens in the global batch: the loss of one process on the whole batch."""
    MICRO_BATCH_MEAN = "micro_batch_mean"
    """The mean over micro-batches and replicas of each micro-batch's own mean, as some other tools compute it."""


class Ownership(str, Enum):
    """Who updates what, in the ranks of a sharding group."""

    REPLICATED = "replicated"
    """Every rank updates everything."""
    TENSORS = "tensors"
    """Every parameter has one owner, who updates all of it."""
    SLICES = "slices"
    """Every rank owns an equal slice of every bucket."""


DIVIDING_AXES = ("sharding",)
"""The axes whose ranks divide ownership."""


class Sharding(str, Enum):
    """What the ranks of a sharding group divide."""

    NONE = "none"
    STAGE1_TENSOR = "stage1 by tensors"
    """Updates and optimizer state, by whole tensors."""
    STAGE1_SLICE = "stage1 by slices"
    """Updates and optimizer state, by flat slices."""
    STAGE2 = "stage2"
    """Reduced gradients too."""
    STAGE3 = "stage3"
    """Parameters too."""

    @property
    def ownership(self) -> Ownership:
        if self is Sharding.NONE:
            return Ownership.REPLICATED
        return Ownership.TENSORS if self is Sharding.STAGE1_TENSOR else Ownership.SLICES


class ShapeExchange(str, Enum):
    """When a pipeline sender tells the receiver the shape of what follows."""

    ONCE = "once"
    EACH_STEP = "each_step"
    EVERY_MESSAGE = "every_message"


@dataclass(frozen=True)
class Strategy:
    """The decisions that shape a step's program. Nothing here refers to a model, a device or a process."""

    topology: Topology = field(default_factory=Topology)
    micro_batches: int = 1
    """Micro-batches per optimizer step on each replica, `k` in every formula."""
    schedule: str = "1F1B"
    """A name for `program.schedules.schedule_named`, or `BEST` until the model is known."""
    virtual_stages: int = 1
    """Stages on each rank of a pipeline."""
    activation_limit: float | None = None
    """Of how many micro-batches a rank may hold the activations of all its layers, under schedules that can be bounded;
    None: of as many as a pipeline has ranks.
    """
    sync: SyncMoment = SyncMoment.LAST_MICRO_BATCH
    overlap: bool = True
    """Reductions start inside the backward as each bucket fills. No meaning after accumulation."""
    average_in_collective: bool = False
    release_gradients: bool = False
    delay_loss_scale: bool = False
    normalization: Normalization = Normalization.TOKENS
    parameter_dtype: str = "float32"
    gradient_dtype: str = "float32"
    """The dtype in which gradients accumulate (the main gradient)."""
    reduce_dtype: str = "float32"
    """The dtype on the wire."""
    scales_loss: bool = False
    """Losses are scaled up so that small gradients survive in float16, and an overflow skips the update."""
    bucket_bytes: int = 25 * 2**20
    """Upper bound of a bucket's gradient bytes; a larger single parameter gets a bucket of its own."""
    sharding: Sharding = Sharding.NONE
    """Effective where the topology has a sharding group of more than one rank."""
    free_in_communication: bool = False
    """A bucket's storage is freed once it is reduced, and the rank keeps the shard that it owns."""
    overlap_gathers: bool = True
    """Updated parameters travel behind the next forward. No meaning where parameters are gathered around their use."""
    shape_exchange: ShapeExchange = ShapeExchange.ONCE
    receive_ahead: bool = False
    """What the next computation needs is being received while the one before it runs."""
    offload_activations: bool = False
    """What forwards save for their backwards waits in host memory."""
    timers: bool = False
    warnings: tuple[str, ...] = ()
    """Sentences for the user: flags that have no effect here."""

    @property
    def placement(self) -> Placement:
        return Placement(self.topology.pp, self.virtual_stages, folded=self.schedule in V_SHAPED)

    @property
    def allowed_activations(self) -> float:
        """The limit, where it is left to the pipeline too."""
        return self.topology.pp if self.activation_limit is None else self.activation_limit

    @property
    def most_activations(self) -> int:
        """The limit in activations of a micro-batch at one stage."""
        return max(self.virtual_stages, int(self.allowed_activations * self.virtual_stages))

    @property
    def ownership(self) -> Ownership:
        return self.sharding.ownership if self.topology.sharding > 1 else Ownership.REPLICATED

    @property
    def shards(self) -> int:
        """The ranks among which the ownership of a bucket is divided."""
        return 1 if self.ownership is Ownership.REPLICATED else self.topology.sharding

    @property
    def divides_parameters(self) -> bool:
        return self.sharding is Sharding.STAGE3 and self.shards > 1

    @property
    def frees_reduced_gradients(self) -> bool:
        """Whether only shards of reduced gradients are kept."""
        shards_only = self.sharding in (Sharding.STAGE2, Sharding.STAGE3)
        return self.shards > 1 and (shards_only or self.free_in_communication)
