"""Small inputs with known answers that training tools have got wrong, under every policy of a gradient's life."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from syncline.arguments import arguments_from_mapping
from syncline.data.batch import MicroBatch
from syncline.data.loader import MicroBatchLoader
from syncline.data.random_tokens import RandomTokenDataset
from syncline.data.sampler import GlobalBatchSampler
from syncline.runtime.optimization.optimizer import OptimizerSettings
from syncline.strategy import Normalization, Strategy
from syncline.strategy.resolve import resolve_strategy
from syncline.strategy.topology import Topology
from syncline.training.engine import start_engine
from syncline.training.job import describe_job, in_float64
from tests.stand_ins import (
    CPU,
    Outcome,
    Run,
    Tokens,
    Weights,
    exact,
    masked,
    policies,
    start_worker,
    tokens,
    train_all,
)
from tests.verification.configurations import LLAMA

pytestmark = pytest.mark.ranks

CHAIN = Weights(stages=(("first",), ("second",)))
"""Two stages of one weight each."""


def under_every_policy(
    pool, steps: Sequence[Sequence[Sequence[Tokens]]], topology: Topology, model: Weights, **settings
) -> list[tuple[str, list[Outcome]]]:
    """(policy, outcome of each rank) of the same steps.

    Replicas are data-parallel, then the ranks of a sharding group; and two of them are four of both kinds, where each
    sample is there twice, which changes no mean.
    """
    normalization = settings.pop("normalization", Normalization.TOKENS)
    topologies = [(topology, steps)]
    if topology.dp > 1:
        topologies.append((replace(topology, dp=1, sharding=topology.dp), steps))
    if topology.dp == 2:
        topologies.append((replace(topology, sharding=2), [[*step, *step] for step in steps]))
    found = []
    for each, its_steps in topologies:
        strategy = Strategy(topology=each, micro_batches=len(steps[0][0]), normalization=normalization)
        runs = {
            f"dp={each.dp} sharding={each.sharding} {name}": Run(its_steps, policy, model, **settings)
            for name, policy in policies(strategy).items()
        }
        by_rank = pool.run(each.world_size, train_all, runs, timeout=240.0)
        found += [(name, [outcomes[name] for outcomes in by_rank]) for name in runs]
    return found


def weights_of(outcomes: Sequence[Outcome]) -> list[dict[str, float]]:
    """The first element of each rank's weights."""
    return [{name: values[0] for name, values in outcome.weights.items()} for outcome in outcomes]


def close(value: float):
    return pytest.approx(value, rel=1e-12)


# ---- What a gradient is divided by -----------------------------------------------------------------------------------


def test_micro_batches_of_1_and_9_tokens_have_the_loss_and_gradient_of_all_10(pool):
    step = [[tokens(2.0), tokens(*[10.0] * 9)]]
    for policy, (outcome,) in under_every_policy(pool, [step], Topology(), Weights()):
        assert outcome.losses == [close(9.2)], policy
        assert outcome.norms == [close(9.2)], policy
        assert outcome.weights["weight"] == [close(1.0 - 0.5 * 9.2)], policy


@pytest.mark.parametrize(("first", "weight"), [(tokens(1.0), 2.0), (masked(1.0), 2.5)])
def test_replicas_count_by_their_tokens(pool, first, weight):
    step = [[first], [tokens(-3.0, -3.0, -3.0)]]
    for policy, outcomes in under_every_policy(pool, [step], Topology(dp=2), Weights()):
        assert weights_of(outcomes) == [{"weight": close(weight)}] * len(outcomes), policy


def test_windows_that_sum_to_4_and_7_average_to_5_and_a_half(pool):
    step = [[tokens(3.0), tokens(5.0)], [tokens(6.0), tokens(8.0)]]
    runs = under_every_policy(
        pool, [step, step], Topology(dp=2), Weights(), normalization=Normalization.MICRO_BATCH_MEAN, learning_rate=1.0
    )
    for policy, outcomes in runs:
        assert weights_of(outcomes) == [{"weight": close(1.0 - 2 * 5.5)}] * len(outcomes), policy
        assert [outcome.norms for outcome in outcomes] == [[close(5.5)] * 2] * len(outcomes), policy


@pytest.mark.parametrize("normalization", list(Normalization))
def test_unit_gradients_of_two_rounds_through_a_pipeline_are_1_on_every_stage(pool, normalization):
    """Two rounds of two micro-batches; each gives each stage's weight one half of what it is averaged over."""
    micro_batch = [*tokens(2.0, weight=0), *tokens(2.0, weight=1)]
    runs = under_every_policy(
        pool, [[[micro_batch] * 4]], Topology(pp=2), CHAIN, normalization=normalization, learning_rate=1.0
    )
    for policy, outcomes in runs:
        assert weights_of(outcomes) == [{"first": close(0.0)}, {"second": close(0.0)}], policy


def test_every_stage_of_a_pipeline_has_the_same_scale(pool):
    stages = Weights(stages=(("first",), ("second",), ("third",)))
    micro_batches = [[*tokens(g, weight=0), *tokens(g, weight=1), *tokens(g, weight=2)] for g in (3.0, 6.0, 9.0, 6.0)]
    for policy, outcomes in under_every_policy(pool, [[micro_batches]], Topology(pp=3), stages):
        updates = [1.0 - weight for outcome in weights_of(outcomes) for weight in outcome.values()]
        assert updates == [close(0.5 * 2.0)] * 3, policy


def test_a_pipeline_weighs_tokens_as_one_stage_does(pool):
    """Micro-batches of 1, 4, 0 and 2 valid tokens, on two replicas with different ones."""
    first = [
        [*tokens(4.0), *masked(16.0)],
        [*tokens(1.0, 2.0), *tokens(3.0, -5.0, weight=1)],
        masked(9.0, weight=1),
        [*tokens(1.5), *tokens(2.5, weight=1)],
    ]
    second = [tokens(7.0, 1.0, weight=1), tokens(-2.0), [*tokens(3.0), *tokens(0.5, weight=1)], masked(2.0)]
    assert sum(not token.masked for replica in (first, second) for given in replica for token in given) == 12
    updates = {"first": (4 + 1 + 2 + 1.5 - 2 + 3) / 12, "second": (3 - 5 + 2.5 + 7 + 1 + 0.5) / 12}
    one_stage = Weights(stages=(("first", "second"),))
    for model in (one_stage, CHAIN):
        topology = Topology(pp=len(model.stages), dp=2)
        for policy, outcomes in under_every_policy(pool, [[first, second]], topology, model):
            for outcome in weights_of(outcomes):
                assert outcome == {name: close(1.0 - 0.5 * updates[name]) for name in outcome}, policy


# ---- The reported loss -----------------------------------------------------------------------------------------------

ROWS, SEQUENCE, VOCABULARY = 8, 10, 128


def reported_losses(rank: int, world_size: int, configurations: Sequence[Mapping[str, int]]) -> list[float]:
    """The loss of the same global batch of `ROWS` sequences, cut as each configuration says."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randint(0, VOCABULARY, (ROWS, SEQUENCE), generator=generator)
    labels = torch.randint(0, VOCABULARY, (ROWS, SEQUENCE), generator=generator)
    labels[torch.rand(ROWS, SEQUENCE, generator=generator) < torch.arange(ROWS)[:, None] / ROWS] = -100
    positions = torch.arange(SEQUENCE).expand(ROWS, SEQUENCE)
    losses = []
    for configuration in configurations:
        config = {**LLAMA, "vocab_size": VOCABULARY, "num_hidden_layers": 2, "intermediate_size": 64}
        arguments = arguments_from_mapping({"model_config": config, "nproc_per_node": world_size, **configuration})
        job = describe_job(arguments, strategy=in_float64(resolve_strategy(arguments)))
        topology, k = job.strategy.topology, job.strategy.micro_batches
        parts = [
            MicroBatch(*columns)
            for columns in zip(*(t.chunk(k * topology.replicas) for t in (inputs, labels, positions)), strict=True)
        ]
        assert len(parts) == k * topology.replicas
        worker = start_engine(job, rank, CPU).worker
        losses.append(float(worker.step(parts[topology.replica(rank) :: topology.replicas], 0.0).loss))
    return losses


def test_the_reported_loss_is_the_same_for_every_k_on_every_rank_with_and_without_a_pipeline(pool):
    def cut(ks: Sequence[int], **degrees: int) -> list[dict[str, int]]:
        return [{"gradient_accumulation_steps": k, **degrees} for k in ks]

    (reference, *others) = pool.run(1, reported_losses, cut((1, 2, 4, 8)))[0]
    assert others == [close(reference)] * 3
    assert 3.0 < reference < 7.0
    two_ranks = [*cut((1, 2, 4)), *cut((1, 2, 4, 8), pipeline_parallel_degree=2)]
    assert pool.run(2, reported_losses, two_ranks) == [[close(reference)] * 7] * 2
    assert pool.run(4, reported_losses, cut((1, 2, 4), pipeline_parallel_degree=2)) == [[close(reference)] * 3] * 4


# ---- Nothing to say --------------------------------------------------------------------------------------------------


def test_a_rank_and_a_micro_batch_without_a_valid_token_contribute_zero(pool):
    step = [[tokens(6.0), masked(5.0)], [masked(9.0), masked(4.0)]]
    for normalization, weight in ((Normalization.TOKENS, 1 - 0.5 * 6.0), (Normalization.MICRO_BATCH_MEAN, 0.25)):
        runs = under_every_policy(pool, [step], Topology(dp=2), Weights(), normalization=normalization)
        for policy, outcomes in runs:
            assert weights_of(outcomes) == [{"weight": close(weight)}] * len(outcomes), policy
            assert [outcome.skipped for outcome in outcomes] == [[False]] * len(outcomes)


@pytest.mark.parametrize("topology", [Topology(dp=2), Topology(pp=2)], ids=["dp=2", "pp=2"])
def test_a_window_without_a_valid_token_changes_nothing_and_says_so(pool, topology):
    """With decay and moments, both of which a gradient of zero would still move."""
    model = Weights(stages=(("first", "second"),)) if topology.pp == 1 else CHAIN
    full = [[[*tokens(4.0), *tokens(2.0, weight=1)], masked(1.0)]] * topology.dp
    empty = [[masked(3.0), masked(4.0)]] * topology.dp
    adamw = OptimizerSettings("adamw", weight_decay=0.5)
    with_empty = under_every_policy(pool, [full, empty, full], topology, model, optimizer=adamw, learning_rate=0.1)
    without = under_every_policy(pool, [full, full], topology, model, optimizer=adamw, learning_rate=0.1)
    for (policy, outcomes), (_, expected) in zip(with_empty, without, strict=True):
        for found, right in zip(outcomes, expected, strict=True):
            assert found.skipped == [False, True, False], policy
            assert found.tokens == [2 * len(outcomes) // topology.pp, 0, 2 * len(outcomes) // topology.pp], policy
            assert found.losses[1] == 0.0, policy
            assert found.norms[1] == 0.0, policy
            assert found.weights == right.weights, policy
            assert found.moments == right.moments, policy
            assert found.moments["step"] == 2.0


# ---- Parameters that are not always used -----------------------------------------------------------------------------

PAIR = Weights(stages=(("a", "b"),))


def test_parameters_used_in_different_micro_batches_are_both_reduced(pool):
    step = [[tokens(2.0, weight=0), tokens(4.0, weight=1)], [tokens(6.0, weight=0), tokens(-8.0, weight=1)]]
    for policy, outcomes in under_every_policy(pool, [step], Topology(dp=2), PAIR):
        assert weights_of(outcomes) == [{"a": close(1 - 0.5 * 2.0), "b": close(1 - 0.5 * -1.0)}] * len(outcomes), policy


@pytest.mark.parametrize("used", [0, 1])
def test_a_parameter_that_is_never_used_stays_equal_on_all_ranks(pool, used):
    step = [[tokens(2.0, weight=used), tokens(4.0, weight=used)], [tokens(6.0, weight=used), masked(1.0)]]
    weights = {"ab"[used]: close(1 - 0.5 * 4.0), "ab"[1 - used]: 1.0}
    for policy, outcomes in under_every_policy(pool, [step], Topology(dp=2), PAIR):
        assert weights_of(outcomes) == [weights] * len(outcomes), policy


def test_parameters_used_on_different_ranks_are_both_reduced(pool):
    """The buckets fill in another order on each rank, and some never."""
    three = Weights(stages=(("a", "b", "c"),))
    step = [[tokens(3.0, weight=0), tokens(6.0, weight=2)], [tokens(9.0, weight=1), tokens(12.0, weight=1)]]
    weights = {"a": close(1 - 0.5 * 0.75), "b": close(1 - 0.5 * 5.25), "c": close(1 - 0.5 * 1.5)}
    for policy, outcomes in under_every_policy(pool, [step], Topology(dp=2), three):
        assert weights_of(outcomes) == [weights] * len(outcomes), policy


# ---- Tied weights ----------------------------------------------------------------------------------------------------

TIED = Weights(stages=(("embedding",), ("head",)), tied={"head": "embedding"}, elements=2)


def test_tied_copies_get_the_sum_of_both_stages_means(pool):
    """Every token is one of two of its replica: g0 = 2, g1 = 6 at the first stage, g2 = 10, g3 = -4 at the last."""
    step = [
        [[*tokens(2 * 2.0, weight=0), *tokens(2 * 10.0, weight=1)]],
        [[*tokens(2 * 6.0, weight=0), *tokens(2 * -4.0, weight=1)]],
    ]
    summed = (2.0 + 6.0) / 2 + (10.0 - 4.0) / 2
    for policy, outcomes in under_every_policy(pool, [step, step], Topology(pp=2, dp=2), TIED):
        found = [weight for outcome in weights_of(outcomes) for weight in outcome.values()]
        assert found == [close(1.0 - 2 * 0.5 * summed)] * len(outcomes), policy


def test_a_tied_weight_counts_once_in_the_norm(pool):
    """The squares of each copy sum to 800."""
    step = [[[*tokens(16.0, weight=0), *tokens(24.0, weight=1)]]]
    for policy, outcomes in under_every_policy(pool, [step], Topology(pp=2), TIED):
        for outcome in outcomes:
            assert outcome.norms == [close(800**0.5)], policy
            assert outcome.norms == [pytest.approx(28.284, abs=1e-3)]


# ---- Norm and clipping -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "stages"),
    [
        (Topology(), (("a", "b"),)),
        (Topology(dp=2), (("a", "b"),)),
        (Topology(pp=2), (("a",), ("b",))),
        (Topology(pp=2, dp=2), (("a",), ("b",))),
    ],
    ids=["one process", "dp=2", "pp=2", "pp=2 dp=2"],
)
def test_clipping_happens_once_to_the_whole_reduced_gradient(pool, topology, stages):
    """Gradients of 3 and 4, from micro-batches whose own norms are far from 5, are divided by their norm of 5."""
    micro_batches = [
        [*tokens(2 * a, weight=0), *tokens(2 * b, weight=1)]
        for a, b in ((12.0, 4.0), (-8.0, 16.0), (4.0, -20.0), (4.0, 16.0))
    ]
    runs = under_every_policy(
        pool, [[micro_batches] * topology.dp], topology, Weights(stages), learning_rate=1.0, max_gradient_norm=1.0
    )
    expected = {"a": close(1.0 - 3.0 / (5.0 + 1e-6)), "b": close(1.0 - 4.0 / (5.0 + 1e-6))}
    for policy, outcomes in runs:
        assert {norm for outcome in outcomes for norm in outcome.norms} == {outcomes[0].norms[0]}, policy
        assert outcomes[0].norms == [close(5.0)], policy
        for weights in weights_of(outcomes):
            assert weights == {name: expected[name] for name in weights}, policy


def test_a_norm_below_the_limit_is_left_alone(pool):
    step = [[tokens(3.0)]]
    for policy, (outcome,) in under_every_policy(pool, [step], Topology(), Weights(), max_gradient_norm=3.5):
        assert outcome.weights["weight"] == [close(1 - 0.5 * 3.0)], policy


# ---- Data that does not divide ---------------------------------------------------------------------------------------


def train_an_epoch(rank: int, world_size: int, samples: int, micro_batch_size: int, k: int) -> list[tuple[int, float]]:
    """(valid tokens, loss) of every update; a sample is four tokens, and each adds 1 to the loss."""
    dataset = RandomTokenDataset(samples, 4, vocabulary_size=50, seed=0)
    sampler = GlobalBatchSampler(samples, micro_batch_size * k * world_size, seed=1)
    loader = MicroBatchLoader(dataset, sampler, micro_batch_size, k, rank, world_size, CPU)
    strategy = exact(Strategy(topology=Topology(dp=world_size), micro_batches=k))
    worker = start_worker(rank, strategy, Weights())
    results = [worker.step([of_unit_gradients(given) for given in window], 0.0) for window in loader.epoch()]
    return [(result.tokens, float(result.loss)) for result in results]


def of_unit_gradients(given: MicroBatch) -> MicroBatch:
    return replace(
        given,
        input_ids=torch.full_like(given.input_ids, 16),
        position_ids=torch.zeros_like(given.position_ids),
    )


def test_148_samples_are_5_updates_the_last_over_its_true_tokens(pool):
    assert pool.run(1, train_an_epoch, 148, 2, 16) == [[(32 * 4, close(1.0))] * 4 + [(20 * 4, close(1.0))]]


def test_ranks_whose_samples_do_not_divide_end_together(pool):
    """7 samples on 3 ranks in windows of 6: the last window has one sample, on one rank."""
    assert pool.run(3, train_an_epoch, 7, 1, 2) == [[(6 * 4, close(1.0)), (1 * 4, close(1.0))]] * 3


def test_the_learning_rate_is_used_once_per_update_whatever_n_and_k(pool):
    """Four replicas with four micro-batches each, and two updates with the rate 0.5."""
    step = [[tokens(2.0)] * 4] * 4
    for policy, outcomes in under_every_policy(pool, [step, step], Topology(dp=4), Weights()):
        assert weights_of(outcomes) == [{"weight": close(1.0 - 2 * 0.5 * 2.0)}] * len(outcomes), policy
