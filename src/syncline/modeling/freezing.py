"""Which parameters the user's patterns freeze."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from syncline.errors import UserError


def frozen_parameters(model: PreTrainedModel, patterns: Sequence[str]) -> set[nn.Parameter]:
    """The parameters in whose global name one of the regular expressions is found; a tied one under any of its names.

    Raises `UserError` for an expression that is invalid or matches nothing, and when nothing is left to be trained.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    frozen: set[nn.Parameter] = set()
    for pattern in patterns:
        try:
            expression = re.compile(pattern)
        except re.error as error:
            raise UserError(
                f"freeze_parameters {pattern!r}", f"it is no regular expression: {error}", "Correct it"
            ) from error
        matches = {parameter for name, parameter in named if expression.search(name)}
        if not matches:
            raise UserError(
                f"freeze_parameters {pattern!r}",
                "it matches no parameter",
                f"Parameters have names such as {named[0][0]}",
            )
        frozen |= matches
    if all(parameter in frozen for _, parameter in named):
        raise UserError("freeze_parameters", "every parameter of the model is frozen", "Leave some to be trained")
    return frozen
