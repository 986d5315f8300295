"""Every buildable program verifies; each way of breaking one is rejected by the rule meant for it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.program.actions import (
    Action,
    AllocateGradients,
    Backward,
    ClipGradients,
    Forward,
    FreeGradients,
    OptimizerStep,
    ReceiveActivation,
    ReceiveGradient,
    ReduceGradients,
    ReduceReplicated,
    ScaleGradients,
    ScaleLoss,
    SendActivation,
    SendGradient,
    WaitReduce,
    ZeroGradients,
)
from syncline.program.analysis.costs import peak_gradient_bytes
from syncline.program.display.text import to_json, to_text
from syncline.program.naive import forward_program
from syncline.program.program import Program
from syncline.program.scales import ONE, Factor
from syncline.program.verification.verify import Violation, verify
from syncline.schedules.placement import Placement
from syncline.strategy import Normalization, Sharding, Strategy, SyncMoment
from syncline.strategy.topology import Topology
from tests.program.breaking import Change, assert_rejected, doubled, first, moved, replaced, swapped, without
from tests.program.examples import small_layout, small_program


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    sync = draw(st.sampled_from(SyncMoment))
    sharding = draw(st.sampled_from(Sharding))
    shards = draw(st.integers(1, 2)) if sharding is Sharding.NONE else draw(st.integers(2, 3))
    return Strategy(
        topology=Topology(pp=draw(st.integers(1, 4)), dp=draw(st.integers(1, 4 // shards)), sharding=shards),
        sharding=sharding,
        free_in_communication=draw(st.booleans()),
        overlap_gathers=draw(st.booleans()),
        scales_loss=draw(st.booleans()),
        micro_batches=draw(st.integers(1, 6)),
        schedule=draw(st.sampled_from(["1F1B", "FThenB"])),
        sync=sync,
        overlap=sync is not SyncMoment.AFTER_ACCUMULATION and draw(st.booleans()),
        average_in_collective=draw(st.booleans()),
        release_gradients=draw(st.booleans()),
        delay_loss_scale=draw(st.booleans()),
        normalization=draw(st.sampled_from(Normalization)),
    )


FROZEN = st.sampled_from([(), ("layers.0.matrix",), ("layers.1.matrix", "layers.1.norm")])


@settings(max_examples=300, deadline=None)
@given(strategy=strategies(), tied=st.booleans(), frozen=FROZEN)
def test_every_buildable_program_verifies(strategy: Strategy, tied: bool, frozen: tuple[str, ...]):
    program = small_program(strategy, tied=tied, frozen=frozen)
    verified = verify(program)
    assert verified.peak_gradient_bytes == program.peak_gradient_bytes
    assert verified.peak_gathered_bytes == program.peak_gathered_bytes
    document = to_json(program)
    assert document["summary"]["reductions_per_step"] == sum(document["summary"]["reductions_per_bucket"].values())
    assert to_text(program)


def test_naive_programs_verify_too():
    from tests.program.examples import small_scaled

    verify(small_scaled(stages=3, replicas=2, micro_batches=4, tied=True))


def test_a_step_of_1024_ranks_verifies():
    verify(small_program(Strategy(topology=Topology(pp=8, dp=128), micro_batches=16)))


@pytest.mark.parametrize("stages", [1, 3])
def test_forward_programs_send_what_is_received(stages: int):
    topology = Topology(pp=stages, dp=2)
    program = forward_program(
        topology, Placement(stages), small_layout(stages=stages, layers=3), 4, small_program(Strategy()).sizes
    )
    kinds = [type(action) for actions in program.ranks for action in actions]
    assert kinds.count(SendActivation) == kinds.count(ReceiveActivation) == 2 * 4 * (stages - 1)
    assert Backward not in kinds


# ---- Broken programs -------------------------------------------------------------------------------------------------

DEFAULT = Strategy(topology=Topology(pp=2, dp=2), micro_batches=3)
EVERY = replace(DEFAULT, sync=SyncMoment.EVERY_MICRO_BATCH)
AFTER = replace(DEFAULT, sync=SyncMoment.AFTER_ACCUMULATION, overlap=False)
RELEASED = replace(DEFAULT, release_gradients=True)
DELAYED = replace(DEFAULT, delay_loss_scale=True)


def reduced_again(rank: int, actions: list[Action]) -> list[Action]:
    """A bucket that has been reduced and waited for is reduced a second time."""
    index = first(actions, WaitReduce)
    bucket = actions[index].bucket  # type: ignore[attr-defined]
    actions[index + 1 : index + 1] = [ReduceGradients(bucket, "dp"), WaitReduce(bucket)]
    return actions


def synchronised_on_the_wrong_micro_batch(rank: int, actions: list[Action]) -> list[Action]:
    """All reductions happen after the first backward instead of the last."""
    starts = [a for a in actions if isinstance(a, ReduceGradients)]
    waits = [a for a in actions if isinstance(a, WaitReduce)]
    rest = [a for a in actions if not isinstance(a, (ReduceGradients, WaitReduce))]
    index = first(rest, Backward) + 1
    return rest[:index] + [replace(a, during=None) for a in starts] + waits + rest[index:]


def waited_after_the_next_backward(rank: int, actions: list[Action]) -> list[Action]:
    index = first(actions, WaitReduce)
    wait = actions.pop(index)
    following = next(i for i in range(index, len(actions)) if isinstance(actions[i], Backward))
    actions.insert(following + 1, wait)
    return actions


def freed_before_the_update(rank: int, actions: list[Action]) -> list[Action]:
    step, free = first(actions, OptimizerStep), first(actions, FreeGradients)
    actions[step], actions[free] = actions[free], actions[step]
    return actions


def divided_once_more_on_the_earlier_stage(rank: int, actions: list[Action]) -> list[Action]:
    if rank in (0, 1):
        index = first(actions, OptimizerStep)
        actions[index] = replace(actions[index], scale=Factor.of(accumulation=-1))  # type: ignore[call-arg]
    return actions


def gradient_awaited_before_the_activation_is_sent(rank: int, actions: list[Action]) -> list[Action]:
    if rank == 0:
        receive = actions.pop(first(actions, ReceiveGradient))
        actions.insert(first(actions, SendActivation), receive)
    return actions


def counts_the_tied_copy_twice(rank: int, actions: list[Action]) -> list[Action]:
    index = first(actions, ClipGradients)
    held = tuple(action.bucket for action in actions if isinstance(action, OptimizerStep))
    actions[index] = replace(actions[index], buckets=held)  # type: ignore[call-arg]
    return actions


def started_away_from_its_backward(rank: int, actions: list[Action]) -> list[Action]:
    """Something stands between a backward and the reductions that start during it."""
    if rank in (2, 3):
        send = actions.pop(first(actions, SendGradient, micro_batch=2))
        actions.insert(first(actions, ReduceGradients), send)
    return actions


BROKEN: list[tuple[int, Strategy, Change, str]] = [
    (1, DEFAULT, without(SendActivation, ranks=(0,)), "a send is missing"),
    (1, DEFAULT, without(SendGradient, ranks=(2,)), "a gradient is never sent"),
    (1, DEFAULT, doubled(SendGradient, ranks=(2,)), "a gradient is sent twice"),
    (1, DEFAULT, replaced(ReceiveActivation, ranks=(2,), micro_batch=1), "another micro-batch is received"),
    (1, DEFAULT, gradient_awaited_before_the_activation_is_sent, "deadlock"),
    (2, DEFAULT, synchronised_on_the_wrong_micro_batch, "sync on the wrong micro-batch"),
    (2, DEFAULT, reduced_again, "reduced twice"),
    (2, AFTER, reduced_again, "reduced twice after accumulation"),
    (2, DEFAULT, without(OptimizerStep), "a bucket is never updated"),
    (2, DEFAULT, doubled(OptimizerStep), "a bucket is updated twice"),
    (2, DEFAULT, doubled(Backward), "a micro-batch is added twice"),
    (2, DEFAULT, without(ReduceReplicated), "tied copies are not summed"),
    (2, DEFAULT, doubled(ReduceReplicated), "tied copies are summed twice"),
    (2, DEFAULT, counts_the_tied_copy_twice, "the norm counts a tied copy twice"),
    (2, AFTER, moved(ReduceGradients, Forward), "reduced before there is anything"),
    (2, DEFAULT, moved(ZeroGradients, ClipGradients), "zeroed before it is read"),
    (3, DEFAULT, without(ReceiveGradient, ranks=(0,), micro_batch=2), "a backward without its input"),
    (3, DEFAULT, without(WaitReduce), "read before its wait"),
    (3, EVERY, waited_after_the_next_backward, "written between start and wait"),
    (3, RELEASED, freed_before_the_update, "used after free"),
    (3, RELEASED, without(FreeGradients), "leaked"),
    (3, RELEASED, without(AllocateGradients), "used without storage"),
    (3, DEFAULT, without(ZeroGradients), "carried into the next step"),
    (3, DEFAULT, without(ReceiveActivation, ranks=(2, 3)), "a forward without its input"),
    (3, AFTER, without(Backward, ranks=(2, 3), micro_batch=2), "a gradient is sent that was not computed"),
    (4, DEFAULT, swapped(ReduceGradients), "another order on one rank"),
    (4, DEFAULT, without(ReduceGradients, ranks=(0,)), "one member does not take part"),
    (4, DEFAULT, replaced(ReduceGradients, ranks=(1,), op="avg"), "another operation on one rank"),
    (4, DEFAULT, started_away_from_its_backward, "started away from its backward"),
    (5, DEFAULT, without(ScaleLoss, ranks=(2, 3)), "one micro-batch is not scaled"),
    (5, DEFAULT, doubled(ScaleLoss, ranks=(2, 3)), "one micro-batch is scaled twice"),
    (5, DEFAULT, replaced(ScaleLoss, ranks=(2, 3), scale=Factor.of(micro_batch_tokens=-1)), "the wrong divisor"),
    (5, DEFAULT, divided_once_more_on_the_earlier_stage, "an earlier stage divides by k again"),
    (5, EVERY, without(ScaleGradients), "a sum is not divided between micro-batches"),
    (5, DELAYED, replaced(OptimizerStep, scale=ONE), "the delayed scale is forgotten"),
    (5, DELAYED, replaced(ClipGradients, scale=ONE), "the norm forgets the delayed scale"),
    (6, RELEASED, doubled(AllocateGradients), "storage is allocated twice"),
]


@pytest.mark.parametrize(("rule", "strategy", "change", "what"), BROKEN, ids=[f"{r}-{w}" for r, _, _, w in BROKEN])
def test_a_broken_program_is_rejected_by_its_rule(rule: int, strategy: Strategy, change: Change, what: str):
    assert_rejected(small_program(strategy, tied=True), change, rule)


def test_a_peak_that_was_not_declared_is_rejected():
    program = small_program(RELEASED)
    with pytest.raises(Violation) as violation:
        verify(replace(program, peak_gradient_bytes=tuple(peak // 2 for peak in program.peak_gradient_bytes)))
    assert violation.value.rule == 6


# ---- Costs and factors -----------------------------------------------------------------------------------------------


def reductions(strategy: Strategy) -> dict[str, int]:
    summary: dict[str, int] = to_json(small_program(strategy))["summary"]["reductions_per_bucket"]
    return summary


def test_after_accumulation_reduces_once_where_the_plain_mode_reduces_k_times():
    data_parallel = Strategy(topology=Topology(dp=2), micro_batches=8)
    every = reductions(replace(data_parallel, sync=SyncMoment.EVERY_MICRO_BATCH))
    after = reductions(replace(data_parallel, sync=SyncMoment.AFTER_ACCUMULATION, overlap=False))
    assert set(every.values()) == {8}
    assert set(after.values()) == {1}


def test_release_holds_nothing_between_steps_and_no_more_within():
    kept, released = small_program(DEFAULT), small_program(RELEASED)
    held = to_json(released)["summary"]["gradient_bytes_between_steps_per_rank"]
    assert held == [0, 0, 0, 0]
    assert released.peak_gradient_bytes == kept.peak_gradient_bytes


def test_peak_counts_only_what_is_alive_at_once():
    program = Program(
        topology=Topology(),
        placement=Placement(),
        layout=small_layout(),
        micro_batches=1,
        target=ONE,
        sizes=small_program(Strategy()).sizes,
        ranks=((AllocateGradients(0), FreeGradients(0), AllocateGradients(1), FreeGradients(1)),),
    )
    assert peak_gradient_bytes(program, 0) == program.gradient_bytes(0)


def test_bubble_of_1f1b():
    """(stages - 1) / (micro_batches + stages - 1), as in the papers on pipeline schedules."""
    summary = to_json(small_program(Strategy(topology=Topology(pp=4), micro_batches=8)))["summary"]
    assert summary["bubble_fraction"] == pytest.approx(3 / 11, abs=1e-6)


def test_bytes_of_an_all_reduce():
    """With 2 members each sends every byte once; scalars add 3 times 8 bytes, of which the norm needs none without a
    pipeline.
    """
    program = small_program(Strategy(topology=Topology(dp=2)), layers=1)
    payload = sum(program.gradient_bytes(bucket.id) for bucket in program.layout.buckets)
    assert to_json(program)["summary"]["bytes_sent_per_rank"] == [payload + 2 * 8] * 2


@given(
    st.dictionaries(st.sampled_from(["tokens", "micro_batch_tokens", "accumulation", "replicas"]), st.integers(-2, 2))
)
def test_a_factor_times_its_inverse_is_one(powers: dict[str, int]):
    factor = Factor.of(**powers)
    inverse = Factor.of(**{name: -power for name, power in powers.items()})
    assert factor * inverse == ONE


def test_factors_read_as_fractions():
    assert str(Factor.of(replicas=1, tokens=-1)) == "replicas/tokens"
    assert str(Factor.of(accumulation=-1, micro_batch_tokens=-1)) == "1/(micro_batch_tokens*accumulation)"
    assert str(ONE) == "1"


def test_dividing_by_no_token_gives_nothing():
    assert Factor.of(tokens=-1).evaluate({"tokens": Fraction(0)}, Fraction(1)) == 0
    assert Factor.of(replicas=1, tokens=-1).evaluate({"tokens": 4.0, "replicas": 2.0}, 1.0) == 0.5


def test_forward_is_not_confused_with_backward():
    assert Forward(0, 1) != Backward(0, 1)
