"""The decisions that shape a job: how ranks are arranged, and what one step does. Pure data: no torch, no arguments.

Only `resolve` knows arguments; it is imported by who has some.
"""

from syncline.strategy.strategy import (
    DIVIDING_AXES,
    Normalization,
    Ownership,
    ShapeExchange,
    Sharding,
    Strategy,
    SyncMoment,
)
from syncline.strategy.topology import Topology

__all__ = [
    "DIVIDING_AXES",
    "Normalization",
    "Ownership",
    "ShapeExchange",
    "Sharding",
    "Strategy",
    "SyncMoment",
    "Topology",
]
