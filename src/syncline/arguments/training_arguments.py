"""All options together."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from syncline.arguments.data import DataArguments
from syncline.arguments.gradients import GradientArguments
from syncline.arguments.model import ModelArguments
from syncline.arguments.option import Option, options_of
from syncline.arguments.parallelism import ParallelismArguments
from syncline.arguments.running import EvaluationArguments, RunArguments
from syncline.arguments.training import BatchArguments, OptimizerArguments
from syncline.arguments.values import read_value
from syncline.errors import UserError


@dataclass(frozen=True, kw_only=True)
class TrainingArguments(
    EvaluationArguments,
    RunArguments,
    ParallelismArguments,
    GradientArguments,
    OptimizerArguments,
    BatchArguments,
    DataArguments,
    ModelArguments,
):
    """Everything a user decides, checked value by value and for what contradicts itself.

    Raises `UserError` for a value of the wrong type or out of range, an unknown choice or flag, and for values that
    exclude each other. What the values amount to together is decided by `syncline.strategy.resolve_strategy`.
    """

    notices: tuple[str, ...] = field(default=(), compare=False)
    """Sentences for the user about keys that meant nothing when these arguments were read. Not an option."""

    def __post_init__(self) -> None:
        for name, each in OPTIONS.items():
            object.__setattr__(self, name, read_value(each, getattr(self, name)))
        if not self.tokenizer_name_or_path:
            object.__setattr__(self, "tokenizer_name_or_path", self.model_name_or_path or "byte")
        _check_model(self)
        _check_learning_rate(self)
        _check_patterns(self)


OPTIONS: dict[str, Option] = options_of(TrainingArguments)
"""Every option by name, in the order of the groups."""


def _check_model(arguments: TrainingArguments) -> None:
    if arguments.model_name_or_path and arguments.model_config is not None:
        raise UserError(
            f"model_name_or_path={arguments.model_name_or_path} and model_config",
            "both name a model",
            "Keep model_name_or_path for trained weights, or model_config for random ones; `null` takes one away.",
        )
    if arguments.model_config is not None and not isinstance(arguments.model_config.get("model_type"), str):
        raise UserError(
            f"model_config={arguments.model_config}",
            "does not say which model it configures",
            "Add its model_type, for example model_config: {model_type: llama, ...}.",
        )


def _check_learning_rate(arguments: TrainingArguments) -> None:
    if arguments.min_learning_rate > arguments.learning_rate:
        raise UserError(
            f"min_learning_rate={arguments.min_learning_rate} and learning_rate={arguments.learning_rate}",
            "the learning rate would end above its peak",
            f"Write a min_learning_rate of at most {arguments.learning_rate}.",
        )


def _check_patterns(arguments: TrainingArguments) -> None:
    for pattern in arguments.freeze_parameters:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(
                f"freeze_parameters={pattern}",
                f"not a regular expression ({error})",
                r"Write a pattern such as `embed_tokens` or `layers\.[01]\.`.",
            ) from None
