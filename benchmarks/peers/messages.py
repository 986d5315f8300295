"""What the benchmark and the peers' processes say to each other: one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any


def send(stream: IO[str], message: Mapping[str, Any]) -> None:
    """Where the other side has ended nothing happens: it is noticed when an answer is waited for."""
    with suppress(ConnectionError):
        stream.write(json.dumps(message) + "\n")
        stream.flush()


def receive(stream: IO[str]) -> dict[str, Any] | None:
    """The next message, once it is there; None when the other side has ended."""
    try:
        line = stream.readline()
    except ConnectionError:
        return None
    return dict(json.loads(line)) if line else None
