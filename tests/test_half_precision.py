"""Float16 with its loss scale, and bfloat16, under every form of sharding: overflows, order, accumulation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import pytest

from syncline.runtime.optimization.optimizer import OptimizerSettings
from syncline.strategy import Sharding, Strategy, SyncMoment
from syncline.strategy.topology import Topology
from tests.stand_ins import Outcome, Run, Weights, sharding_forms, tokens, train_all

pytestmark = pytest.mark.ranks

SCALE = 32768.0
ADAMW = OptimizerSettings("adamw", weight_decay=0.1)

TOPOLOGIES = {
    "one rank": Topology(),
    "dp=2": Topology(dp=2),
    "sharding=2": Topology(sharding=2),
    "dp=2 sharding=2": Topology(dp=2, sharding=2),
    "pp=2": Topology(pp=2),
    "pp=2 dp=2": Topology(pp=2, dp=2),
    "pp=2 sharding=2": Topology(pp=2, sharding=2),
}


def half(topology: Topology, dtype: str = "float16", micro_batches: int = 1, **decisions) -> dict[str, Strategy]:
    """Every form of sharding that the topology has, in 16 bits with float32 main gradients."""
    strategy = Strategy(
        topology=topology,
        micro_batches=micro_batches,
        parameter_dtype=dtype,
        scales_loss=dtype == "float16",
        bucket_bytes=1,
        **decisions,
    )
    forms = {"not sharded": strategy}
    if topology.sharding > 1:
        forms |= sharding_forms(strategy)
    return forms


def model_of(topology: Topology) -> Weights:
    return Weights((("a",), ("b",)) if topology.pp == 2 else (("a", "b"),))


def run_all(pool, topology: Topology, runs: Mapping[str, Run]) -> list[tuple[str, list[Outcome]]]:
    by_rank = pool.run(topology.world_size, train_all, runs, timeout=120.0)
    return [(name, [outcomes[name] for outcomes in by_rank]) for name in runs]


# ---- An overflow -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0, 1], ids=["in a", "in b"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_an_overflow_on_one_rank_skips_the_step_everywhere(pool, topology, weight):
    """A gradient of 6, one half of a mean, overflows when it is scaled by 32768. It is there on the last replica only,
    and in a pipeline on one stage.
    """
    axes = TOPOLOGIES[topology]
    replicas = axes.replicas
    quiet = [[[*tokens(0.5, weight=0), *tokens(0.25, weight=1)]]] * replicas
    large = [*quiet[:-1], [[*tokens(6.0, weight=weight), *tokens(0.25, weight=1 - weight)]]]
    steps = [quiet, large, quiet]
    run = partial(Run, model=model_of(axes), optimizer=ADAMW, learning_rate=0.125, loss_scale=SCALE)
    runs = {}
    for name, strategy in half(axes).items():
        runs[name] = run(steps, strategy)
        runs[f"{name}, without the overflow"] = run([quiet, quiet], strategy)
    outcomes = dict(run_all(pool, axes, runs))
    for name in half(axes):
        for found, right in zip(outcomes[name], outcomes[f"{name}, without the overflow"], strict=True):
            assert found.skipped == [False, True, False], name
            assert found.loss_scales == [SCALE, SCALE, SCALE / 2], name
            assert not math.isfinite(found.norms[1])
            assert math.isfinite(found.losses[1])
            assert found.weights == right.weights, name
            assert found.moments == right.moments, name
            assert found.moments.get("step", 2.0) == 2.0


def test_a_scale_that_is_much_too_large_falls_until_gradients_fit(pool):
    topology = Topology(sharding=2)
    steps = [[[tokens(1.0, 1.0)]] * 2] * 6
    runs = {
        name: Run(steps, strategy, model_of(topology), learning_rate=0.125, loss_scale=SCALE * 8)
        for name, strategy in half(topology).items()
    }
    for name, outcomes in run_all(pool, topology, runs):
        for outcome in outcomes:
            assert outcome.skipped == [True, True, True, False, False, False], name
            assert outcome.loss_scales == [SCALE * 8, SCALE * 4, SCALE * 2, SCALE, SCALE, SCALE], name
            # Three updates of a gradient of one.
            assert outcome.weights["a"] == [1.0 - 3 * 0.125], name


# ---- What must not depend on when things happen ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("topology", ["dp=2", "sharding=2", "dp=2 sharding=2", "pp=2 sharding=2"])
def test_overlap_delay_and_release_wait_before_they_scale(pool, topology, dtype):
    """Four micro-batches; values whose sums are exact, so that every policy must agree with arithmetic, bit by bit."""
    axes = TOPOLOGIES[topology]
    gradients = (1.0, 2.0, -0.5, 1.5)
    micro_batches = [[*tokens(g, weight=0), *tokens(2 * g, weight=1)] for g in gradients]
    mean = {"a": 4.0 / 8, "b": 8.0 / 8}
    steps = [[micro_batches] * axes.replicas] * 2
    runs = {}
    for delay in (False, True):
        for overlap in (False, True):
            for sync in (SyncMoment.LAST_MICRO_BATCH, SyncMoment.EVERY_MICRO_BATCH):
                decisions = {
                    "delay_loss_scale": delay,
                    "overlap": overlap,
                    "sync": sync,
                    "release_gradients": overlap is delay,
                    "average_in_collective": delay,
                }
                for form, strategy in half(axes, dtype, 4, **decisions).items():
                    name = f"{form} {delay=} {overlap=} {sync.value}"
                    runs[name] = Run(steps, strategy, model_of(axes), learning_rate=0.25, loss_scale=1024.0)
    for name, outcomes in run_all(pool, axes, runs):
        for outcome in outcomes:
            assert outcome.skipped == [False, False], name
            for weight, (value,) in outcome.weights.items():
                assert value == 1.0 - 2 * 0.25 * mean[weight], name


def test_forms_of_sharding_are_all_there():
    names = {form.value for form in Sharding if form is not Sharding.NONE}
    assert names < set(half(Topology(sharding=2)))
