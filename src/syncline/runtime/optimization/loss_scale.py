"""The loss scale of float16: as large as gradients allow, found by trial.

It halves when a gradient has overflowed, and doubles after many steps without an overflow. Every rank follows the same
global decisions, so all have the same scale.

Source: Micikevicius et al., "Mixed Precision Training" (2018), section 3.2; the constants are those of
`torch.amp.GradScaler`.
"""

from __future__ import annotations

from dataclasses import dataclass

GROWTH, BACKOFF = 2.0, 0.5
GROWTH_INTERVAL = 2000
"""Steps without an overflow after which the scale grows."""
SMALLEST = 1.0


@dataclass
class LossScale:
    """The scale, and how long it has lasted."""

    value: float
    steps_without_overflow: int = 0

    def update(self, *, finite: bool) -> None:
        """Follow the decision of one step."""
        if not finite:
            self.value = max(SMALLEST, self.value * BACKOFF)
            self.steps_without_overflow = 0
            return
        self.steps_without_overflow += 1
        if self.steps_without_overflow == GROWTH_INTERVAL:
            self.value *= GROWTH
            self.steps_without_overflow = 0
