"""`enable_allreduce_avg_in_gradient_scale`: a sum followed by a division by `replicas` becomes an average in the
collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from syncline.program.actions import Action, ReduceGradients, ScaleGradients
from syncline.program.program import Program
from syncline.program.scales import Factor

MEAN = Factor.of(replicas=-1)


def average_in_collective(program: Program) -> Program:
    def change(rank: int, actions: Sequence[Action]) -> list[Action]:
        changed: list[Action] = []
        summed: set[int] = set()
        for action in actions:
            if isinstance(action, ReduceGradients) and action.op == "sum":
                if program.owns(rank, action.bucket):
                    summed.add(action.bucket)
                action = replace(action, op="avg")
            elif isinstance(action, ScaleGradients) and action.scale == MEAN and action.bucket in summed:
                summed.remove(action.bucket)
                continue
            changed.append(action)
        assert not summed, f"rank {rank} sums buckets {summed} without dividing them"
        return changed

    return program.map_ranks(change)
