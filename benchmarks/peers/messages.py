"""What the benchmark and the peers' processes say to each other: one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO, Any


def send(stream: IO[str], message: Mapping[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def receive(stream: IO[str]) -> dict[str, Any] | None:
    """The next message, once it is there; None when the other side has ended."""
    line = stream.readline()
    return dict(json.loads(line)) if line else None
