"""Each way of breaking a program whose ranks divide updates or parameters is rejected by the rule meant for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from syncline.program.actions import (
    AccumulateShard,
    Action,
    AllocateGradients,
    Backward,
    CheckFinite,
    ClipGradients,
    CountTokens,
    Forward,
    FreeGradients,
    FreeParameters,
    GatherParameters,
    OptimizerStep,
    Part,
    ReduceGradients,
    ReduceLoss,
    ReduceReplicated,
    ScaleLoss,
    WaitGather,
    WaitReduce,
    ZeroGradients,
    bucket_of,
)
from syncline.program.scales import ONE, Factor
from syncline.program.verification.verify import Violation, verify
from syncline.strategy import Sharding, Strategy, SyncMoment
from syncline.strategy.topology import Topology
from tests.program.breaking import (
    Change,
    all_of,
    all_replaced,
    assert_rejected,
    doubled,
    first,
    moved,
    replaced,
    swapped,
    without,
    without_any,
)
from tests.program.examples import small_forward_program, small_program

SLICES = Strategy(topology=Topology(dp=2, sharding=2), micro_batches=2, sharding=Sharding.STAGE1_SLICE, overlap=False)
TENSORS = replace(SLICES, sharding=Sharding.STAGE1_TENSOR)
EVERY = replace(SLICES, sync=SyncMoment.EVERY_MICRO_BATCH)
STAGE2 = replace(EVERY, sharding=Sharding.STAGE2)
STAGE3 = replace(EVERY, sharding=Sharding.STAGE3)
OVERLAPPED = replace(STAGE3, overlap=True)
AFTER = replace(SLICES, sync=SyncMoment.AFTER_ACCUMULATION)
AT_ONCE = replace(SLICES, overlap_gathers=False)
RELEASED = replace(STAGE2, release_gradients=True)
SCALED = replace(SLICES, scales_loss=True)
TIED = replace(SLICES, topology=Topology(pp=2, sharding=2))
SHARD, BUCKET = Part.SHARD, Part.BUCKET


def without_reductions(group: str, ranks: Sequence[int] = (0, 1, 2, 3)) -> Change:
    """Reductions over a group are neither started nor waited for."""

    def change(rank: int, actions: list[Action]) -> list[Action]:
        kept: list[Action] = []
        dropped: set[int | None] = set()
        for action in actions:
            if rank in ranks and isinstance(action, ReduceGradients) and action.group == group:
                dropped.add(action.bucket)
            elif isinstance(action, WaitReduce) and action.bucket in dropped:
                dropped.remove(action.bucket)
            else:
                kept.append(action)
        return kept

    return change


def accumulated_before_the_wait(rank: int, actions: list[Action]) -> list[Action]:
    at = first(actions, AccumulateShard)
    wait = max(index for index in all_of(actions, WaitReduce, bucket=bucket_of(actions[at])) if index < at)
    actions.insert(wait, actions.pop(at))
    return actions


def accumulated_before_the_reduction(rank: int, actions: list[Action]) -> list[Action]:
    at = first(actions, AccumulateShard)
    actions.insert(first(actions, ReduceGradients, bucket=bucket_of(actions[at])), actions.pop(at))
    return actions


def updates_what_another_owns(rank: int, actions: list[Action]) -> list[Action]:
    owned = {bucket_of(actions[index]) for index in all_of(actions, OptimizerStep)}
    other = next(action.bucket for action in actions if isinstance(action, WaitGather) and action.bucket not in owned)
    actions.insert(first(actions, OptimizerStep), OptimizerStep(other))
    return actions


def counts_what_another_owns(rank: int, actions: list[Action]) -> list[Action]:
    everything = sorted({action.bucket for action in actions if isinstance(action, WaitGather)})
    return all_replaced(ClipGradients, buckets=tuple(everything))(rank, actions)


def counts_nothing(rank: int, actions: list[Action]) -> list[Action]:
    return all_replaced(ClipGradients, buckets=())(rank, actions) if rank == 0 else actions


def without_gather(ranks: Sequence[int] = (0, 1, 2, 3), **fields: object) -> Change:
    """The first bucket that is gathered is neither gathered nor waited for."""

    def change(rank: int, actions: list[Action]) -> list[Action]:
        if rank not in ranks:
            return actions
        gather = first(actions, GatherParameters, **fields)
        bucket = bucket_of(actions.pop(gather))
        waits = all_of(actions, WaitGather, bucket=bucket)
        del actions[next((index for index in waits if index >= gather), waits[0])]
        return actions

    return change


def gathered_before_the_last_update(rank: int, actions: list[Action]) -> list[Action]:
    last = all_of(actions, OptimizerStep)[-1]
    step = actions.pop(last)
    actions.insert(first(actions, GatherParameters, bucket=bucket_of(step)) + 1, step)
    return actions


def gathered_before_the_norm(rank: int, actions: list[Action]) -> list[Action]:
    actions.insert(first(actions, ClipGradients), actions.pop(first(actions, GatherParameters)))
    return actions


def freed_before_it_is_used(rank: int, actions: list[Action]) -> list[Action]:
    """What stays from the forward for the backward is freed in between."""
    backward = first(actions, Backward)
    waited = {bucket_of(actions[index]) for index in all_of(actions, WaitGather, during=actions[backward])}
    stays = next(
        bucket_of(actions[index])
        for index in all_of(actions, FreeParameters)
        if index > backward and bucket_of(actions[index]) not in waited
    )
    assert stays is not None
    actions.insert(backward, FreeParameters(stays))
    return actions


def freed_on_its_way(rank: int, actions: list[Action]) -> list[Action]:
    wait = first(actions, WaitGather)
    free = next(index for index in all_of(actions, FreeParameters, bucket=bucket_of(actions[wait])) if index > wait)
    actions.insert(wait, actions.pop(free))
    return actions


def checked_before_the_norm(rank: int, actions: list[Action]) -> list[Action]:
    check = actions.pop(first(actions, CheckFinite))
    actions.insert(first(actions, ClipGradients), check)
    return actions


def undone_twice(rank: int, actions: list[Action]) -> list[Action]:
    for kind in (ClipGradients, OptimizerStep):
        for index in all_of(actions, kind):
            scale: Factor = actions[index].scale  # type: ignore[attr-defined]
            actions[index] = replace(actions[index], scale=scale * Factor.of(loss_scale=-1))  # type: ignore[call-arg]
    return actions


def reduced_across_replicas_in_another_order(rank: int, actions: list[Action]) -> list[Action]:
    """A wait and the reduction that follows it change places with the next pair, on one rank."""
    if rank == 0:
        at = first(actions, ReduceGradients, group="dp") - 1
        actions[at : at + 4] = [*actions[at + 2 : at + 4], *actions[at : at + 2]]
    return actions


def without_last(kind: type[Action], **fields: object) -> Change:
    def change(rank: int, actions: list[Action]) -> list[Action]:
        del actions[all_of(actions, kind, **fields)[-1]]
        return actions

    return change


def never_updated(rank: int, actions: list[Action]) -> list[Action]:
    """Nor gathered: nothing else gives it away."""
    bucket = bucket_of(actions[first(actions, OptimizerStep)])
    return without_any(OptimizerStep, GatherParameters, WaitGather, bucket=bucket)(rank, actions)


def gathered_in_another_order(rank: int, actions: list[Action]) -> list[Action]:
    """All gathers stand behind the last update, on one rank the other way round."""
    gathers = [actions[index] for index in all_of(actions, GatherParameters)]
    rest = [action for action in actions if not isinstance(action, GatherParameters)]
    behind = all_of(rest, OptimizerStep)[-1] + 1
    return [*rest[:behind], *(gathers[::-1] if rank == 0 else gathers), *rest[behind:]]


def used_in_another_order(rank: int, actions: list[Action]) -> list[Action]:
    """On one rank the parts of the first layer change places."""
    other = {6: 5, 5: 6}
    kinds = (GatherParameters, WaitGather)
    return [
        replace(action, bucket=other.get(action.bucket, action.bucket))
        if rank == 0 and isinstance(action, kinds) and action.during == Forward(0, 0)
        else action
        for action in actions
    ]


BROKEN: list[tuple[int, Strategy, Change, str]] = [
    (2, SLICES, without_reductions("dp"), "nothing is reduced across replicas"),
    (2, TENSORS, without_reductions("dp"), "nothing is reduced across replicas, by tensors"),
    (2, EVERY, without_reductions("sharding"), "nothing is reduced to its owners"),
    (4, SLICES, without_reductions("dp", ranks=[0]), "one owner does not reduce across replicas"),
    (4, AFTER, swapped(ReduceGradients, group="sharding"), "one rank reduces to its owners in another order"),
    (4, AFTER, reduced_across_replicas_in_another_order, "one rank reduces across replicas in another order"),
    (2, SLICES, replaced(ReduceGradients, ranks=(1,), kind="all_reduce"), "one rank reduces by another kind"),
    (2, SLICES, doubled(OptimizerStep), "a slice is updated twice"),
    (2, SLICES, never_updated, "a slice is never updated"),
    (3, SLICES, without(OptimizerStep), "gathered though nobody has updated it"),
    (2, TENSORS, updates_what_another_owns, "an update of what another rank owns"),
    (2, TENSORS, counts_what_another_owns, "the norm counts what another rank owns"),
    (2, SLICES, counts_nothing, "one rank leaves its slices out of the norm"),
    (2, SLICES, moved(ZeroGradients, ClipGradients), "cleared before it is read"),
    (3, SLICES, without(ZeroGradients), "carried into the next step"),
    (3, SLICES, without(WaitReduce), "a further reduction before the first is there"),
    # Shards.
    (3, EVERY, accumulated_before_the_wait, "added to the shard before it is reduced"),
    (2, EVERY, accumulated_before_the_reduction, "added to the shard without a reduction"),
    (2, EVERY, doubled(AccumulateShard), "added to the shard twice"),
    (2, EVERY, without(AccumulateShard), "not added to the shard"),
    (2, EVERY, without(ZeroGradients, part=BUCKET), "a backward adds to what is reduced in the owned part only"),
    (3, EVERY, without(ZeroGradients, part=SHARD), "the shard is not cleared"),
    (2, EVERY, moved(OptimizerStep, Forward), "an update before there is a gradient"),
    (3, RELEASED, without(FreeGradients, part=SHARD), "the shard is leaked"),
    (3, RELEASED, without_last(FreeGradients, part=BUCKET), "a bucket is leaked"),
    (6, RELEASED, without(FreeGradients, part=BUCKET), "a bucket is kept for the next micro-batch"),
    (3, RELEASED, without(AllocateGradients, part=SHARD), "the shard has no storage"),
    (3, STAGE2, without(AllocateGradients, part=BUCKET), "a bucket has no storage"),
    (6, RELEASED, doubled(AllocateGradients, part=SHARD), "the shard is allocated twice"),
    (3, SLICES, replaced(ZeroGradients, part=SHARD), "there is no shard to clear"),
    # Parameters.
    (3, SLICES, without_gather(), "the next step begins with outdated parameters"),
    (3, AT_ONCE, without_gather(), "a step ends with outdated parameters"),
    (3, SLICES, without(WaitGather), "used before they are there"),
    (3, AT_ONCE, without(WaitGather), "a gather without an end"),
    (3, SLICES, without(GatherParameters), "a wait without a gather"),
    (3, AT_ONCE, doubled(GatherParameters), "gathered twice"),
    (3, SLICES, gathered_before_the_last_update, "gathered before the update"),
    (3, SLICES, gathered_before_the_norm, "gathered before the norm"),
    (4, SLICES, gathered_in_another_order, "one rank gathers in another order"),
    (3, SLICES, replaced(GatherParameters, ranks=(0,), kind="broadcast"), "one rank gathers by another kind"),
    (4, AT_ONCE, without_gather(ranks=[1]), "one rank does not take part in a gather"),
    (3, STAGE3, without_gather(during=Forward(0, 0)), "divided parameters are used without a gather"),
    (3, STAGE3, freed_before_it_is_used, "used after they were freed"),
    (3, STAGE3, freed_on_its_way, "freed on their way"),
    (3, STAGE3, doubled(FreeParameters), "freed twice"),
    (3, STAGE3, doubled(GatherParameters), "gathered twice while they are there"),
    (3, STAGE3, without(FreeParameters), "gathered where they were not freed"),
    (3, STAGE3, without_last(FreeParameters), "divided parameters are whole at the end"),
    (4, STAGE3, used_in_another_order, "one rank gathers in another order around use"),
    (4, OVERLAPPED, all_replaced(GatherParameters, {"during": Forward(0, 0)}, during=Forward(0, 1)), "another forward"),
    # float16.
    (3, SCALED, checked_before_the_norm, "the norm is read before it is computed"),
    (5, SCALED, all_replaced(OptimizerStep, scale=ONE), "the loss scale is not undone"),
    (5, SCALED, replaced(ClipGradients, scale=ONE), "the norm is that of the scaled gradients"),
    (5, SCALED, undone_twice, "the loss scale is undone twice"),
    (5, SCALED, all_replaced(ScaleLoss, scale=Factor.of(replicas=1, tokens=-1)), "losses are not scaled up"),
    # Tied weights.
    (2, TIED, without(ReduceReplicated), "tied copies are not summed"),
    (2, TIED, doubled(ReduceReplicated), "tied copies are summed twice"),
    (2, TIED, without(ReduceReplicated, ranks=(0,)), "one owner does not sum its copies"),
]


@pytest.mark.parametrize(("rule", "strategy", "change", "what"), BROKEN, ids=[f"{r}-{w}" for r, _, _, w in BROKEN])
def test_a_broken_program_is_rejected_by_its_rule(rule: int, strategy: Strategy, change: Change, what: str):
    assert_rejected(small_program(strategy, tied=strategy is TIED), change, rule)


def groups_exchanged(rank: int, actions: list[Action]) -> list[Action]:
    """Slices are scattered across replicas, and what each has is summed in the sharding group."""
    other = {"dp": "sharding", "sharding": "dp"}
    return [replace(a, group=other[a.group]) if isinstance(a, ReduceGradients) else a for a in actions]


def summed_across_replicas_first(rank: int, actions: list[Action]) -> list[Action]:
    """The runtime sums owned parts only, of which each rank of the sharding group needs all."""
    kinds = {"dp": ("sharding", "reduce_scatter"), "sharding": ("dp", "all_reduce")}
    changed: list[Action] = []
    for action in actions:
        if isinstance(action, ReduceGradients):
            group, kind = kinds[action.group]
            action = replace(action, group=group, kind=kind)
        changed.append(action)
    return changed


def checked_after_the_updates(rank: int, actions: list[Action]) -> list[Action]:
    actions.append(actions.pop(first(actions, CheckFinite)))
    return actions


UNLIKE: list[tuple[int, Strategy, Change, str]] = [
    (2, SLICES, all_replaced(ReduceGradients, {"kind": "reduce_scatter"}, kind="reduce"), "slices to one owner"),
    (2, TENSORS, all_replaced(ReduceGradients, {"kind": "reduce"}, kind="reduce_scatter"), "tensors to slices"),
    (2, SLICES, all_replaced(ReduceGradients, kind="all_reduce"), "an all-reduce, which the runtime does in slices"),
    (2, SLICES, groups_exchanged, "slices of the wrong group"),
    (2, SLICES, summed_across_replicas_first, "slices of replicas before there are slices"),
    (3, SLICES, all_replaced(GatherParameters, group="dp"), "gathered from other replicas"),
    (3, STAGE3, all_replaced(GatherParameters, group="dp"), "divided parameters gathered from other replicas"),
    (3, SLICES, all_replaced(GatherParameters, kind="broadcast"), "slices are broadcast"),
    (3, TENSORS, all_replaced(GatherParameters, kind="all_gather"), "tensors are gathered in slices"),
    (2, SLICES, all_replaced(ClipGradients, group="dp"), "the norm joins replicas"),
    (2, TIED, all_replaced(ClipGradients, group="sharding"), "the norm leaves stages out"),
    (2, SLICES, all_replaced(ClipGradients, group="world"), "the norm counts every replica"),
    (5, SLICES, all_replaced(CountTokens, group="dp"), "tokens of some replicas"),
    (5, SLICES, all_replaced(ReduceLoss, group="dp"), "the loss of some replicas"),
    (5, SLICES, all_replaced(ReduceLoss, scale=ONE), "the loss is not scaled"),
    (3, SCALED, without(CheckFinite), "nobody looks for an overflow"),
    (3, SCALED, without(CheckFinite, ranks=(0,)), "one rank does not look for an overflow"),
    (3, SCALED, checked_after_the_updates, "an overflow is found when all is updated"),
]


@pytest.mark.parametrize(("rule", "strategy", "change", "what"), UNLIKE, ids=[f"{r}-{w}" for r, _, _, w in UNLIKE])
def test_a_program_unlike_the_runtime_is_rejected(rule: int, strategy: Strategy, change: Change, what: str):
    assert_rejected(small_program(strategy, tied=strategy is TIED), change, rule)


@pytest.mark.parametrize("strategy", [SLICES, TENSORS, STAGE2, STAGE3, RELEASED])
def test_a_peak_of_gradients_that_was_not_declared_is_rejected(strategy):
    program = small_program(strategy)
    lies = tuple(peak + (4 if rank == 3 else 0) for rank, peak in enumerate(program.peak_gradient_bytes))
    with pytest.raises(Violation, match="rank 3") as violation:
        verify(replace(program, peak_gradient_bytes=lies))
    assert violation.value.rule == 6


def test_a_peak_of_gathered_parameters_that_was_not_declared_is_rejected():
    program = small_program(STAGE3)
    assert min(program.peak_gathered_bytes) > 0
    lies = tuple(peak // 2 for peak in program.peak_gathered_bytes)
    with pytest.raises(Violation, match="bytes of gathered parameters") as violation:
        verify(replace(program, peak_gathered_bytes=lies))
    assert violation.value.rule == 6


# ---- Forwards alone --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("sharding", Sharding)
@pytest.mark.parametrize("degrees", [{}, {"pp": 3}, {"dp": 2, "sharding": 2}, {"pp": 2, "sharding": 3}], ids=str)
def test_an_evaluation_is_right_however_training_is_divided(degrees, sharding, tied):
    strategy = Strategy(topology=Topology(**degrees), sharding=sharding)
    for micro_batches in (1, 4):
        verify(small_forward_program(strategy, micro_batches, tied=tied), updates=False)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (without(WaitGather), 3),
        (without(FreeParameters), 3),
        (without(GatherParameters, ranks=(1,)), 3),
        (all_replaced(ReduceLoss, group="dp"), 5),
        (doubled(Forward), 3),
    ],
)
def test_a_wrong_evaluation_is_rejected(change, rule):
    assert_rejected(small_forward_program(STAGE3, 2), change, rule, updates=False)
