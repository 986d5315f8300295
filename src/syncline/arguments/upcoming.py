"""What Syncline knows by name and does not do yet: the features, and what to use until they are here."""

from __future__ import annotations

from enum import Enum


class Upcoming(Enum):
    """A feature that is announced: what brings it, and what to use now."""

    TENSOR = ("tensor parallelism", "Use pipeline_parallel_degree now to split a model that does not fit")
    SEQUENCE = ("sequence and context parallelism", "Use recompute or a smaller max_seq_length now to save activations")
    OFFLOAD = ("offloading", "Use offload_activations, recompute or enable_release_grads now to save memory")
    CHECKPOINTS = (
        "checkpoints",
        "The trained model is saved at the end as a Hugging Face folder; leave this key out now",
    )

    def __init__(self, title: str, instead: str) -> None:
        self.title = title
        self.instead = instead

    def __str__(self) -> str:
        return f"arrives with {self.title}"
