"""Where things stand in a rank's list."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.program.actions import Action, Backward, ClipGradients


def last_backward(actions: Sequence[Action]) -> int:
    """The position of the last backward: behind it no gradient is written any more."""
    return max(index for index, action in enumerate(actions) if isinstance(action, Backward))


def clipping(actions: Sequence[Action]) -> int:
    """The position of the clipping: in front of it every gradient is reduced, behind it none is written."""
    return next(index for index, action in enumerate(actions) if isinstance(action, ClipGradients))
