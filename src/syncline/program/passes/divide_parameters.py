"""`stage3`: parameters are gathered just before a computation uses them, and freed behind their last use in it.

While one bucket is in use, the next one that the computation uses is on its way, and none further. From one computation
to the next only the bucket stays with which the next one begins.
"""

from __future__ import annotations

from collections.abc import Sequence

from syncline.program.actions import (
    USING_PARAMETERS,
    Action,
    Computation,
    Forward,
    FreeParameters,
    GatherParameters,
    WaitGather,
)
from syncline.program.layout import Bucket
from syncline.program.passes.sharding import GROUP
from syncline.program.program import Program


def gather_around_use(program: Program) -> Program:
    """Gathers and frees stand around every computation, and nowhere else."""

    def change(rank: int, actions: Sequence[Action]) -> list[Action]:
        kept = [action for action in actions if not isinstance(action, (GatherParameters, WaitGather))]
        computations = [action for action in kept if isinstance(action, USING_PARAMETERS)]
        orders = [_in_order_of_use(computation, program) for computation in computations]
        changed: list[Action] = [GatherParameters(orders[0][0].id, GROUP)]
        whole: set[int] = set()
        behind: list[Action] = []
        begins = [order[0].id for order in orders[1:]]
        for action in kept:
            if getattr(action, "during", None) is None:
                changed += behind
                behind = []
            changed.append(action)
            if isinstance(action, USING_PARAMETERS):
                following = begins.pop(0) if begins else None
                order = orders.pop(0)
                inside, in_use = _inside(action, order, whole)
                changed += inside
                behind = [FreeParameters(bucket.id) for bucket in in_use if bucket.id != following]
                whole = {bucket.id for bucket in in_use if bucket.id == following}
                if following is not None and following not in whole:
                    behind.append(GatherParameters(following, GROUP))
        return changed

    return program.map_ranks(change)


def _inside(computation: Computation, order: Sequence[Bucket], whole: set[int]) -> tuple[list[Action], list[Bucket]]:
    """What happens inside `computation`, and the buckets that are in use at its end. `whole` holds those that need not
    be waited for.
    """
    inside: list[Action] = []
    in_use: list[Bucket] = []
    for index, bucket in enumerate(order):
        if bucket.id not in whole:
            inside.append(WaitGather(bucket.id, computation))
        over = [other for other in in_use if _interval(computation, other)[1] < _interval(computation, bucket)[0]]
        inside += [FreeParameters(other.id, computation) for other in over]
        in_use = [*(other for other in in_use if other not in over), bucket]
        if index + 1 < len(order):
            inside.append(GatherParameters(order[index + 1].id, GROUP, during=computation))
    return inside, in_use


def _in_order_of_use(computation: Computation, program: Program) -> list[Bucket]:
    buckets = program.layout.all_of_stage(computation.stage)
    return sorted(buckets, key=lambda bucket: (_interval(computation, bucket), -bucket.id))


def _interval(computation: Computation, bucket: Bucket) -> tuple[int, int]:
    """From when to when `computation` uses the bucket; a backward uses them the other way round."""
    if isinstance(computation, Forward):
        return bucket.first_use, bucket.last_use
    return -bucket.last_use, -bucket.first_use
