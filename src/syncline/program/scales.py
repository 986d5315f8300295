"""Scale factors as exact products of named quantities, so that rule 5 can be proven and not merely measured.

The quantities are `tokens` (valid tokens in the global batch), `micro_batch_tokens` (valid tokens in one micro-batch of
one replica), `accumulation` (micro-batches per step, k), `replicas` (ranks that average a gradient, n) and `loss_scale`
(by which losses are scaled up so that small gradients survive in float16).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

QUANTITIES = ("loss_scale", "tokens", "micro_batch_tokens", "accumulation", "replicas")

Number = TypeVar("Number")


@dataclass(frozen=True)
class Factor:
    """A product of powers of the quantities, written as `replicas/tokens` or `1/(accumulation*replicas)`."""

    powers: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def of(**powers: int) -> Factor:
        unknown = set(powers) - set(QUANTITIES)
        assert not unknown, f"unknown quantities {unknown}"
        return Factor(tuple((name, powers[name]) for name in QUANTITIES if powers.get(name)))

    def __mul__(self, other: Factor) -> Factor:
        powers = dict(self.powers)
        for name, power in other.powers:
            powers[name] = powers.get(name, 0) + power
        return Factor.of(**powers)

    def __bool__(self) -> bool:
        """False for the factor 1, which need not be applied."""
        return bool(self.powers)

    def __str__(self) -> str:
        above = [name for name, power in self.powers for _ in range(max(power, 0))]
        below = [name for name, power in self.powers for _ in range(max(-power, 0))]
        text = "*".join(above) or "1"
        if not below:
            return text
        return f"{text}/{below[0]}" if len(below) == 1 else f"{text}/({'*'.join(below)})"

    def evaluate(self, quantities: Mapping[str, Number], one: Number) -> Number:
        """The factor's value in the arithmetic of `one` (floats, fractions). Dividing by a quantity that is 0 gives 0.

        No valid token means that there is nothing to average: such a gradient is 0, not undefined.
        """
        value = one
        for name, power in self.powers:
            quantity = quantities[name]
            if power < 0 and not quantity:
                return one - one  # type: ignore[operator]
            for _ in range(abs(power)):
                value = value * quantity if power > 0 else value / quantity  # type: ignore[operator]
        return value


ONE = Factor()
