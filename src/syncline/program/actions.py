"""The vocabulary of a step: everything a rank may do between two optimizer steps, as frozen data.

An action with a `during` names the backward inside which it happens as soon as it can: an allocation at the first
gradient of its bucket, a reduction at the last one. It stands in the list right behind that backward, and has happened
at the latest there: a bucket that some of its parameters never reach is allocated or reduced where the action stands.
Reductions start in list order, whatever the order in which buckets fill, so every member of a group issues the same
sequence.

`group` names the ranks that take part (see `program.program.Program.members`): axes joined by `+` (`dp`), `world`, or
`tied:0,3` for the stages 0 and 3 of the same pipeline.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from syncline.program.factors import ONE, Factor


@dataclass(frozen=True)
class Action:
    """What one rank does next."""

    def to_json(self) -> dict[str, Any]:
        """A JSON object: `action` is the snake_case class name; fields that say nothing (None, the factor 1) are left
        out.
        """
        document: dict[str, Any] = {"action": snake_case(type(self).__name__)}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or value == ONE or value == "":
                continue
            if isinstance(value, Action):
                value = value.to_json()
            elif isinstance(value, Factor):
                value = str(value)
            elif isinstance(value, tuple):
                value = list(value)
            document[field.name] = value
        return document


def snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


# ---- Compute ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forward(Action):
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class ScaleLoss(Action):
    """Seeds the backward of one micro-batch with a factor; stands between its forward and its backward on the last
    stage.
    """

    stage: int
    micro_batch: int
    scale: Factor


@dataclass(frozen=True)
class Backward(Action):
    """Gradients of the stage's input and of its weights; the latter are added to the stage's buckets."""

    stage: int
    micro_batch: int


# ---- Point-to-point --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PointToPoint(Action):
    """`stage` is the rank's own stage, `peer` the other side's global rank.

    A receive waits for its message. A send returns at once unless `MESSAGES_IN_FLIGHT` earlier ones are still on their
    way."""

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
class SendGradient(PointToPoint):
    direction: ClassVar[str] = "gradient"


@dataclass(frozen=True)
class ReceiveGradient(PointToPoint):
    direction: ClassVar[str] = "gradient"


# ---- The life of a gradient ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AllocateGradients(Action):
    """Gives a bucket zeroed storage. A bucket without this action keeps its storage from step to step."""

    bucket: int
    during: Backward | None = None


@dataclass(frozen=True)
class ReduceGradients(Action):
    """Starts a collective on a bucket and returns; nobody may touch the bucket until its `WaitReduce`."""

    bucket: int
    group: str
    op: str = "sum"
    kind: str = "all_reduce"
    during: Backward | None = None


@dataclass(frozen=True)
class WaitReduce(Action):
    bucket: int


@dataclass(frozen=True)
class ScaleGradients(Action):
    bucket: int
    scale: Factor


@dataclass(frozen=True)
class ReduceReplicated(Action):
    """Sums the copies of a parameter that several ranks of one replica hold; `what` names the parameter."""

    bucket: int
    group: str
    what: str


@dataclass(frozen=True)
class ZeroGradients(Action):
    """Clears a bucket's storage and keeps it."""

    bucket: int


@dataclass(frozen=True)
class FreeGradients(Action):
    bucket: int


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
class OptimizerStep(Action):
    """Updates what this rank owns of a bucket with its gradient times `scale` and the clipping factor, in one pass."""

    bucket: int
    scale: Factor = ONE


@dataclass(frozen=True)
class ReduceLoss(Action):
    """The reported loss: the sum, over all micro-batches of all replicas, of the token losses times `scale`."""

    group: str
    scale: Factor
