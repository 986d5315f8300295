"""What arguments can ask for that Syncline knows and does not do yet: one table, and its refusal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from syncline.arguments import TrainingArguments
from syncline.arguments.upcoming import Upcoming
from syncline.errors import UserError


@dataclass(frozen=True)
class Unsupported:
    """Values of one option that arrive with a later feature."""

    option: str
    values: str
    """The refused values, in words."""
    asked: Callable[[TrainingArguments], bool]
    arrives: Upcoming


UNSUPPORTED = (
    Unsupported("sharding", "with offload", lambda a: "offload" in a.sharding, Upcoming.OFFLOAD),
    Unsupported("tensor_parallel_degree", "more than 1", lambda a: a.tensor_parallel_degree > 1, Upcoming.TENSOR),
    Unsupported("sep_parallel_degree", "more than 1", lambda a: a.sep_parallel_degree > 1, Upcoming.SEQUENCE),
    Unsupported("save_strategy", "steps, epoch", lambda a: a.save_strategy in ("steps", "epoch"), Upcoming.CHECKPOINTS),
    Unsupported(
        "save_steps",
        "any, unless save_strategy is no",
        lambda a: a.save_steps is not None and a.save_strategy != "no",
        Upcoming.CHECKPOINTS,
    ),
    Unsupported("resume_from_checkpoint", "any", lambda a: bool(a.resume_from_checkpoint), Upcoming.CHECKPOINTS),
    Unsupported("load_best_model_at_end", "true", lambda a: a.load_best_model_at_end, Upcoming.CHECKPOINTS),
)
"""Flags that arrive later say so in `syncline.arguments.flags.FLAGS`."""


def refuse_unsupported(arguments: TrainingArguments) -> None:
    """Raises `UserError` for the first value that arrives with a later feature."""
    for entry in UNSUPPORTED:
        if entry.asked(arguments):
            value = getattr(arguments, entry.option)
            written = " ".join(value) if isinstance(value, tuple) else value
            raise UserError(f"{entry.option}={written}", str(entry.arrives), f"{entry.arrives.instead}.")
