"""The vocabulary of a step: everything a rank may do between two optimizer steps, as frozen data.

An action with a `during` names the computation inside which it happens as soon as it can. It stands in the
list behind that computation, and has happened at the latest there: a bucket that some of its parameters never reach is
allocated, reduced or gathered where the action stands. What moves gradients (`Reduce...`, `WaitReduce` and what stands
between them) keeps its order, and so does what moves parameters, whatever the order in which the model fills and uses
buckets; so every member of a group issues the same sequence. Inside a computation

- an allocation happens at the first gradient of its bucket;
- a bucket's first reduction happens at its last gradient, and what moves gradients without an event of its own (waits,
  frees, further reductions) when the next event that stands behind it comes;
- a `WaitGather` happens at the first use of its bucket, and the gathers and frees behind it follow at once;
- an `OffloadActivations` goes on from beginning to end.

`group` names the ranks that take part (see `program.program.Program.members`): axes joined by `+` (`dp`), `world`, or
`tied:0,3` for the stages 0 and 3 of the same pipeline.

The computations are a schedule's, and so defined beside schedules (`syncline.schedules.computations`).

Under sharding a rank *owns* a part of each bucket (see `program.layout`), and updates that part. The gradient of what
it owns is read from the bucket itself, or from the *shard*: storage of the owned part's size in which the reduced
gradients of several micro-batches add up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

from syncline.program.scales import ONE, Factor
from syncline.schedules.computations import (
    ADDING_GRADIENTS,
    COMPUTATIONS,
    USING_PARAMETERS,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Computation,
    Forward,
)

__all__ = [
    "ADDING_GRADIENTS",
    "COMPUTATIONS",
    "USING_PARAMETERS",
    "AccumulateShard",
    "Action",
    "AllocateGradients",
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Bubble",
    "CheckFinite",
    "ClipGradients",
    "Computation",
    "CountTokens",
    "Forward",
    "FreeGradients",
    "FreeParameters",
    "GatherParameters",
    "OffloadActivations",
    "OptimizerStep",
    "Part",
    "PointToPoint",
    "ReceiveActivation",
    "ReceiveGradient",
    "ReduceGradients",
    "ReduceLoss",
    "ReduceReplicated",
    "ScaleGradients",
    "ScaleLoss",
    "SendActivation",
    "SendGradient",
    "StartReceivingActivation",
    "StartReceivingGradient",
    "WaitGather",
    "WaitReduce",
    "ZeroGradients",
    "bucket_of",
    "happening_during",
    "snake_case",
]


class Part(str, Enum):
    """Which storage of a bucket's gradients is meant."""

    BUCKET = "bucket"
    """Of the whole bucket."""
    SHARD = "shard"
    """Of what the rank owns of it."""


def snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def happening_during(computation: Action, action: Action) -> Action:
    """The action inside `computation`, if it is one that can be inside."""
    return replace(action, **{"during": computation}) if hasattr(action, "during") else action


def bucket_of(action: Action) -> int | None:
    """The bucket that the action is about, if it is about one."""
    bucket: int | None = getattr(action, "bucket", None)
    return bucket


# ---- Compute ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaleLoss(Action):
    """Seeds the backward of one micro-batch with a factor; stands between its forward and its backward on the last
    stage.
    """

    stage: int
    micro_batch: int
    scale: Factor


@dataclass(frozen=True)
class OffloadActivations(Action):
    """What the forward of a micro-batch saves for its backward moves to host memory as it is saved, and comes back as
    the backward needs it.
    """

    stage: int
    micro_batch: int
    during: Computation


# ---- Point-to-point --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PointToPoint(Action):
    """`stage` is the rank's own stage, `peer` the other side's global rank.

    A receive waits for its message. A send returns at once unless as many earlier ones to the same peer in the same
    direction are still on their way as the program allows (`Program.messages_in_flight`).
    """

    stage: int
    micro_batch: int
    peer: int
    direction: ClassVar[str] = ""


@dataclass(frozen=True)
class SendActivation(PointToPoint):
    direction: ClassVar[str] = "activation"


@dataclass(frozen=True)
class ReceiveActivation(PointToPoint):
    direction: ClassVar[str] = "activation"


@dataclass(frozen=True)
class StartReceivingActivation(PointToPoint):
    """Makes room for a message and returns; the receive that belongs to it waits for the message."""

    direction: ClassVar[str] = "activation"


@dataclass(frozen=True)
class SendGradient(PointToPoint):
    direction: ClassVar[str] = "gradient"


@dataclass(frozen=True)
class ReceiveGradient(PointToPoint):
    direction: ClassVar[str] = "gradient"


@dataclass(frozen=True)
class StartReceivingGradient(PointToPoint):
    """As `StartReceivingActivation`."""

    direction: ClassVar[str] = "gradient"


@dataclass(frozen=True)
class Bubble(Action):
    """Nothing to do until the next message comes, or until other ranks of the pipeline have computed what is theirs."""

    index: int
    """Which of the rank's bubbles in this step it is, from 0."""
    capacity: float
    """How long it lasts where messages take no time and all stages as long: in forwards through one stage."""


# ---- The life of a gradient ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AllocateGradients(Action):
    """Gives a bucket, or its shard, zeroed storage. One without this action keeps its storage from step to step."""

    bucket: int
    during: Computation | None = None
    part: Part = Part.BUCKET


@dataclass(frozen=True)
class ReduceGradients(Action):
    """Starts a collective on a bucket, in place, and returns; nobody may touch the bucket until its `WaitReduce`.

    After an `all_reduce` every rank has the result. After a `reduce_scatter` each has that of its slice, after a
    `reduce` the owner has it, and whatever else the bucket holds is worthless. A bucket of which only the owned part is
    worth something is reduced in that part only.
    """

    bucket: int
    group: str
    op: str = "sum"
    kind: str = "all_reduce"
    during: Computation | None = None


@dataclass(frozen=True)
class WaitReduce(Action):
    bucket: int
    during: Computation | None = None


@dataclass(frozen=True)
class AccumulateShard(Action):
    """Adds the owned, reduced part of a bucket to the shard."""

    bucket: int
    during: Computation | None = None


@dataclass(frozen=True)
class ScaleGradients(Action):
    """Multiplies what the next reader reads: the shard where there is one, else the bucket."""

    bucket: int
    scale: Factor


@dataclass(frozen=True)
class ReduceReplicated(Action):
    """Sums all copies of a parameter that ranks of one replica hold, and gives each of them the sum; `what` names the
    parameter, `bucket` has the first of the copies that this rank holds.
    """

    bucket: int
    group: str
    what: str


@dataclass(frozen=True)
class ZeroGradients(Action):
    """Clears a bucket's, or a shard's, storage and keeps it."""

    bucket: int
    during: Computation | None = None
    part: Part = Part.BUCKET


@dataclass(frozen=True)
class FreeGradients(Action):
    bucket: int
    during: Computation | None = None
    part: Part = Part.BUCKET


# ---- Decisions and updates -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CountTokens(Action):
    """The number of valid tokens in the global batch, on every rank."""

    group: str


@dataclass(frozen=True)
class ClipGradients(Action):
    """One norm over all parameters, each counted once, and one clipping factor.

    `buckets` are those that this rank contributes; `group` joins the parts. The norm is that of the gradient times
    `scale`.
    """

    buckets: tuple[int, ...]
    group: str
    scale: Factor = ONE


@dataclass(frozen=True)
class CheckFinite(Action):
    """One global decision, read off the norm: unless it is finite no rank updates anything, and losses scale down."""


@dataclass(frozen=True)
class OptimizerStep(Action):
    """Updates what this rank owns of a bucket with its gradient times `scale` and the clipping factor, in one pass."""

    bucket: int
    scale: Factor = ONE


@dataclass(frozen=True)
class ReduceLoss(Action):
    """The reported loss: the sum, over all micro-batches of all replicas, of the token losses times `scale`."""

    group: str
    scale: Factor


# ---- The life of divided parameters ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class GatherParameters(Action):
    """Starts bringing a bucket's parameters from their owners, and returns; they may be used after its `WaitGather`.

    Gives the bucket its parameter storage where that was freed.
    """

    bucket: int
    group: str
    kind: str = "all_gather"
    """`all_gather` of slices, or `broadcast` from the owner."""
    during: Computation | None = None


@dataclass(frozen=True)
class WaitGather(Action):
    bucket: int
    during: Computation | None = None


@dataclass(frozen=True)
class FreeParameters(Action):
    """Drops all of a bucket's parameters but what this rank owns."""

    bucket: int
    during: Computation | None = None
