"""What a failed collective or message tells: what was waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


class CommunicationError(RuntimeError):
    """A collective or message did not complete: a peer died, or the timeout passed."""


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Turn a backend's failure into one that says what was waited for."""
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(f"rank {dist.get_rank()} waited for {what}, which did not come: {error}") from error
