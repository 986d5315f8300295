"""Which pipeline stages each pipeline rank holds.

Vocabulary: a *stage* is a run of consecutive layers; stages are numbered along the model. A *position* is a rank's
coordinate along the `pp` axis. With several stages at each position they are *virtual* stages.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """Stages go round: position 0 holds stages 0, `positions`, 2 * `positions` and so on. If `folded` they go to and
    fro: behind the last position comes the last position again.
    """

    positions: int = 1
    per_position: int = 1
    """Stages at each position."""
    folded: bool = False

    @property
    def stages(self) -> int:
        return self.positions * self.per_position

    @property
    def last_stage(self) -> int:
        return self.stages - 1

    def position(self, stage: int) -> int:
        """Where `stage` is."""
        way, along = divmod(stage, self.positions)
        return self.positions - 1 - along if self.folded and way % 2 else along

    def stages_at(self, position: int) -> tuple[int, ...]:
        """The stages at `position`, in the order of the model."""
        return tuple(stage for stage in range(self.stages) if self.position(stage) == position)
