"""How a model's layers are divided among pipeline stages: `pp_seg_method`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

from torch import nn

from syncline.arguments.segmentation import Segmentation, listed_layers, pattern
from syncline.errors import UserError


def assign_layers(
    layers: Sequence[nn.Module],
    before: Sequence[nn.Module],
    after: Sequence[nn.Module],
    stages: int,
    segmentation: Segmentation,
) -> tuple[range, ...]:
    """For each stage the indices of its layers; every stage has one at least.

    `uniform`: the stage that costs most costs as little as possible, then stages are as equal as possible. What lies
    before the layers costs on the first stage, and what lies after them, the head, on the last. With a pattern the
    same, but only the layers whose class it finds cost anything, and all the same.

    Raises `UserError` when there are more stages than layers, or `segmentation` does not fit the model.
    """
    listed, wanted = listed_layers(segmentation), pattern(segmentation)
    if listed is not None:
        _refuse_other_than_listed(len(layers), stages, listed)
        return _ranges(listed)
    if wanted is not None:
        costs = [int(re.search(wanted, type(layer).__name__) is not None) for layer in layers]
        _refuse_too_few(sum(costs), stages, f"layers that {wanted!r} finds", _classes(layers))
        return _ranges(balanced(costs, 0, 0, stages))
    _refuse_too_few(len(layers), stages, "layers")
    first, last = (sum(map(products_per_token, modules)) for modules in (before, after))
    return _ranges(balanced([products_per_token(layer) for layer in layers], first, last, stages))


def products_per_token(module: nn.Module) -> int:
    """Multiplications of a forward through the module's matrices for one token, through every expert; attention scores
    are not counted. An embedding reads one row.
    """
    return sum(
        parameter.shape[-1] if isinstance(part, nn.Embedding) else parameter.numel()
        for part in module.modules()
        for parameter in part.parameters(recurse=False)
        if parameter.dim() >= 2
    )


def balanced(costs: Sequence[int], first: int, last: int, stages: int) -> tuple[int, ...]:
    """How many of the layers with these costs each stage gets, where the first and the last stage have costs besides.

    The largest cost of a stage is the least possible. Then the sum of the squares is; what is left over goes to middle
    stages, the earlier ones first.
    """
    ends = [0, *accumulate(costs)]

    def cost(stage: int, start: int, stop: int) -> int:
        return ends[stop] - ends[start] + first * (stage == 0) + last * (stage == stages - 1)

    limit = _least_limit(costs, first, last, stages)
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    """By the number of layers of the stages so far: squares, layers on outer stages, and minus the layers of each."""
    for stage in range(stages):
        outer = stage in (0, stages - 1)
        found: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for start, (squares, on_outer, counts) in best.items():
            for stop in range(start + 1, len(costs) - (stages - 1 - stage) + 1):
                own = cost(stage, start, stop)
                if own > limit:
                    break
                count = stop - start
                each = (squares + own**2, on_outer + outer * count, (*counts, -count))
                found[stop] = min(found.get(stop, each), each)
        best = found
    return tuple(-count for count in best[len(costs)][2])


def _least_limit(costs: Sequence[int], first: int, last: int, stages: int) -> int:
    """The least cost that no stage needs to exceed."""
    low, high = 0, sum(costs) + first + last
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _suffices(costs, first, last, stages, middle) else (middle + 1, high)
    return low


def _suffices(costs: Sequence[int], first: int, last: int, stages: int, limit: int) -> bool:
    """Whether layers can be divided so that no stage exceeds `limit`: each takes as many as it may, and leaves one for
    each stage behind it.
    """
    start = 0
    for stage in range(stages - 1):
        own, stop = first if stage == 0 else 0, start
        while stop < len(costs) - (stages - 1 - stage) and own + costs[stop] <= limit:
            own += costs[stop]
            stop += 1
        if stop == start:
            return False
        start = stop
    return sum(costs[start:]) + last + (first if stages == 1 else 0) <= limit


def _ranges(counts: Sequence[int]) -> tuple[range, ...]:
    starts = [0, *accumulate(counts)]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=False))


def _classes(layers: Sequence[nn.Module]) -> str:
    return " and ".join(dict.fromkeys(type(layer).__name__ for layer in layers))


def _refuse_too_few(count: int, stages: int, what: str, classes: str = "") -> None:
    if stages > count:
        raise UserError(
            f"{stages} pipeline stages",
            f"the model has {count} {what}, and every stage needs one"
            + (f"; its layers are {classes}" * bool(classes)),
            f"Write a pipeline_parallel_degree, times virtual_pp_degree (2 under ZBV, DualPipeV and BoundedV), of "
            f"{count} or less"
            if count
            else "Write pp_seg_method: uniform",
        )


def _refuse_other_than_listed(layers: int, stages: int, listed: tuple[int, ...]) -> None:
    given = f"pp_seg_method={','.join(map(str, listed))}"
    if len(listed) != stages:
        raise UserError(
            f"{given} with {stages} pipeline stages",
            f"it lists the layers of {len(listed)} stages",
            "Write one number for each stage: pipeline_parallel_degree times virtual_pp_degree (2 under ZBV, "
            "DualPipeV and BoundedV) of them",
        )
    if sum(listed) != layers:
        raise UserError(given, f"these are {sum(listed)} layers, and the model has {layers}", "Correct the numbers")
