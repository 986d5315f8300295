"""From arguments to decisions: what acts, what warns and what is refused."""

from dataclasses import replace
from typing import Any

import pytest

from syncline.arguments import OPTIONS, arguments_from_mapping
from syncline.arguments.flags import FLAGS, Need, Status
from syncline.errors import UserError
from syncline.schedules import BEST
from syncline.schedules.placement import Placement
from syncline.strategy import Normalization, Ownership, ShapeExchange, Sharding, Strategy, SyncMoment
from syncline.strategy.resolve import resolve_strategy
from syncline.strategy.resolve.ineffective import INEFFECTIVE
from syncline.strategy.resolve.unsupported import UNSUPPORTED
from syncline.strategy.topology import Topology

TWO_REPLICAS = {"data_parallel_degree": 2, "gradient_accumulation_steps": 4}
TWO_STAGES = {"pipeline_parallel_degree": 2, "gradient_accumulation_steps": 4}
BOTH = {**TWO_REPLICAS, **TWO_STAGES}
TWO_SHARDS = {"sharding_parallel_degree": 2, "gradient_accumulation_steps": 4, "gradient_sync": "last_micro_batch"}
STAGE1 = {**TWO_SHARDS, "sharding": "stage1"}
BY_SLICES = {**STAGE1, "sharding_parallel_config": "split_param"}
FREED = {**STAGE1, "sharding_parallel_config": "free_grads_in_comm"}
STAGE2 = {**TWO_SHARDS, "sharding": "stage2"}
STAGE3 = {**TWO_SHARDS, "sharding": "stage3"}


def resolve(**keys: Any) -> Strategy:
    return resolve_strategy(arguments_from_mapping(keys))


def refusal(**keys: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        resolve(**keys)
    assert caught.value.given
    assert caught.value.wrong
    assert caught.value.instead.endswith(".")
    return caught.value


def test_the_defaults_are_one_rank_without_a_warning():
    assert resolve() == Strategy()


class TestTopology:
    @pytest.mark.parametrize(
        ("keys", "topology"),
        [
            ({"nproc_per_node": 3}, Topology(dp=3)),
            ({"nproc_per_node": 4, "pipeline_parallel_degree": 2}, Topology(pp=2, dp=2)),
            ({"pipeline_parallel_degree": 2}, Topology(pp=2)),
            ({"pipeline_parallel_degree": 2, "data_parallel_degree": 3}, Topology(pp=2, dp=3)),
            ({"nproc_per_node": 2, "world_size": 8, "pipeline_parallel_degree": 4}, Topology(pp=4, dp=2)),
            ({"data_parallel_degree": -1, "nproc_per_node": 2}, Topology(dp=2)),
            (
                {"nproc_per_node": 4, "pipeline_parallel_degree": 2, "hybrid_parallel_topo_order": "sharding_first"},
                Topology(pp=2, dp=2, order="sharding_first"),
            ),
            ({"sharding": "stage1", "nproc_per_node": 4}, Topology(sharding=4)),
            ({"sharding": "stage1", "nproc_per_node": 4, "sharding_parallel_degree": -1}, Topology(sharding=4)),
            ({"sharding": "stage2", "nproc_per_node": 4, "data_parallel_degree": 2}, Topology(dp=2, sharding=2)),
            ({"sharding": "stage3", "nproc_per_node": 8, "pipeline_parallel_degree": 2}, Topology(pp=2, sharding=4)),
            ({"sharding": "stage1", "nproc_per_node": 8, "sharding_parallel_degree": 2}, Topology(dp=4, sharding=2)),
            ({"sharding": "stage1", "sharding_parallel_degree": 2}, Topology(sharding=2)),
            ({"sharding": "stage1", "nproc_per_node": 1}, Topology()),
            ({"sharding": "stage1"}, Topology()),
            ({"nproc_per_node": 4, "sharding_parallel_degree": 2}, Topology(dp=2, sharding=2)),
            ({"nproc_per_node": 4}, Topology(dp=4)),
        ],
    )
    def test_degrees(self, keys, topology):
        assert resolve(**keys).topology == topology

    def test_a_world_that_the_degrees_do_not_divide_is_refused(self):
        error = refusal(nproc_per_node=3, pipeline_parallel_degree=2)
        assert error.given == "nproc_per_node=3 and pipeline_parallel_degree=2"
        assert error.wrong == "3 ranks cannot be divided into groups of 2"
        assert error.instead == "Write nproc_per_node: 2 or 4, or degrees whose product divides 3."
        assert "nproc_per_node: 4," in refusal(nproc_per_node=3, pipeline_parallel_degree=4).instead

    def test_a_world_that_is_not_the_product_of_the_degrees_is_refused(self):
        error = refusal(world_size=8, data_parallel_degree=2, pipeline_parallel_degree=2)
        assert error.wrong == "the degrees multiply to 4, not to 8"
        assert error.instead == "Write world_size: 4, or leave data_parallel_degree out."

    def test_degrees_of_sharding_must_divide_the_world_too(self):
        error = refusal(nproc_per_node=6, sharding="stage1", sharding_parallel_degree=4)
        assert error.given == "nproc_per_node=6 and sharding_parallel_degree=4"
        assert error.wrong == "6 ranks cannot be divided into groups of 4"
        error = refusal(nproc_per_node=6, sharding="stage1", data_parallel_degree=4)
        assert error.wrong == "the degrees multiply to 4, not to 6"


class TestGradientLife:
    @pytest.mark.parametrize("topology", [TWO_REPLICAS, BOTH], ids=["data parallel", "hybrid"])
    def test_data_parallel_flags_act_in_every_topology(self, topology):
        strategy = resolve(
            **topology,
            data_parallel_config="gradient_sync_after_accumulate enable_allreduce_avg_in_gradinent_scale",
            pipeline_parallel_config="enable_release_grads enable_delay_scale_loss",
        )
        assert strategy.sync is SyncMoment.AFTER_ACCUMULATION
        assert strategy.average_in_collective
        assert strategy.release_gradients
        assert strategy.delay_loss_scale
        assert not strategy.overlap
        assert strategy.warnings == ()

    @pytest.mark.parametrize(
        ("keys", "sync", "overlap"),
        [
            ({}, SyncMoment.LAST_MICRO_BATCH, True),
            ({"gradient_sync": "every_micro_batch"}, SyncMoment.EVERY_MICRO_BATCH, True),
            ({"gradient_sync": "after_accumulation"}, SyncMoment.AFTER_ACCUMULATION, False),
            ({"overlap_gradient_reduction": False}, SyncMoment.LAST_MICRO_BATCH, False),
            ({"data_parallel_config": "enable_dp_comm_overlap"}, SyncMoment.LAST_MICRO_BATCH, True),
            (
                {"gradient_sync": "after_accumulation", "overlap_gradient_reduction": False},
                SyncMoment.AFTER_ACCUMULATION,
                False,
            ),
        ],
    )
    def test_sync_moment_and_overlap(self, keys, sync, overlap):
        strategy = resolve(**TWO_REPLICAS, **keys)
        assert (strategy.sync, strategy.overlap, strategy.warnings) == (sync, overlap, ())

    @pytest.mark.parametrize(
        "keys",
        [
            {"gradient_sync": "last_micro_batch", "data_parallel_config": "gradient_sync_after_accumulate"},
            {"overlap_gradient_reduction": False, "pipeline_parallel_config": "enable_dp_comm_overlap"},
            {"release_grads": False, "sharding_parallel_config": "enable_release_grads"},
        ],
    )
    def test_a_key_against_its_flag_is_refused(self, keys):
        error = refusal(**TWO_REPLICAS, **keys)
        assert all(key in error.given for key in keys)
        assert error.wrong.startswith("the flag means")

    @pytest.mark.parametrize(
        "keys",
        [
            {"data_parallel_config": "gradient_sync_after_accumulate enable_dp_comm_overlap"},
            {"gradient_sync": "after_accumulation", "overlap_gradient_reduction": True},
        ],
    )
    def test_overlap_after_accumulation_is_refused(self, keys):
        error = refusal(**TWO_REPLICAS, **keys)
        assert "no backward is left to overlap with" in error.wrong
        assert "last_micro_batch" in error.instead

    def test_release_by_key(self):
        assert resolve(release_grads=True).release_gradients

    def test_after_accumulation_of_one_micro_batch_is_a_warning(self):
        (warning,) = resolve(data_parallel_degree=2, data_parallel_config="gradient_sync_after_accumulate").warnings
        assert "gradient_accumulation_steps is 1" in warning

    def test_buckets_and_normalization(self):
        strategy = resolve(gradient_bucket_size_MB=0.5, gradient_normalization="micro_batch_mean")
        assert strategy.bucket_bytes == 2**19
        assert strategy.normalization is Normalization.MICRO_BATCH_MEAN


class TestSharding:
    @pytest.mark.parametrize(
        ("keys", "sharding", "ownership", "frees"),
        [
            (STAGE1, Sharding.STAGE1_TENSOR, Ownership.TENSORS, False),
            (BY_SLICES, Sharding.STAGE1_SLICE, Ownership.SLICES, False),
            (FREED, Sharding.STAGE1_TENSOR, Ownership.TENSORS, True),
            ({**STAGE1, "sharding": True}, Sharding.STAGE1_TENSOR, Ownership.TENSORS, False),
            (STAGE2, Sharding.STAGE2, Ownership.SLICES, True),
            (STAGE3, Sharding.STAGE3, Ownership.SLICES, True),
        ],
    )
    def test_what_is_divided(self, keys, sharding, ownership, frees):
        strategy = resolve(**keys)
        assert strategy.sharding is sharding
        assert strategy.ownership is ownership
        assert strategy.shards == 2
        assert strategy.frees_reduced_gradients is frees
        assert strategy.divides_parameters is (sharding is Sharding.STAGE3)
        assert strategy.warnings == ()

    @pytest.mark.parametrize("stage", ["stage1", "stage2", "stage3"])
    def test_one_rank_has_nothing_to_divide(self, stage):
        strategy = resolve(sharding=stage)
        assert strategy.ownership is Ownership.REPLICATED
        assert (strategy.shards, strategy.divides_parameters, strategy.frees_reduced_gradients) == (1, False, False)
        (warning,) = strategy.warnings
        assert warning == "sharding has no effect here: there is only one rank to divide among."

    def test_replicas_that_were_asked_to_be_whole_are_not_divided(self):
        strategy = resolve(sharding="stage1", data_parallel_degree=2)
        assert strategy.shards == 1
        (warning,) = strategy.warnings
        assert "sharding_parallel_degree divides among so many" in warning

    def test_two_stages_are_refused(self):
        error = refusal(sharding="stage1 stage3", sharding_parallel_degree=2)
        assert (error.given, error.instead) == ("sharding=stage1 stage3", "Write sharding: stage3.")

    @pytest.mark.parametrize(
        "averages",
        [
            {"sharding_parallel_config": "disable_stage1_reduce_avg use_reduce_avg"},
            {
                "sharding_parallel_config": "disable_stage1_reduce_avg",
                "data_parallel_config": "enable_allreduce_avg_in_gradient_scale",
            },
        ],
    )
    def test_sums_and_averages_are_refused_together_where_both_would_act(self, averages):
        assert "disable_stage1_reduce_avg" in refusal(**{**STAGE1, **averages}).given
        assert resolve(**{**STAGE2, **averages}).average_in_collective

    def test_ranks_that_divide_nothing_are_replicas(self):
        strategy = resolve(sharding_parallel_degree=2, data_parallel_degree=2)
        assert strategy.sharding is Sharding.NONE
        assert (strategy.topology.replicas, strategy.shards) == (4, 1)
        (warning,) = strategy.warnings
        assert warning.startswith("sharding_parallel_degree has no effect here: nothing is sharded")

    @pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
    @pytest.mark.parametrize(
        ("keys", "given"),
        [
            (BY_SLICES, "sharding=stage1 with split_param"),
            (STAGE2, "sharding=stage2"),
            (STAGE3, "sharding=stage3"),
        ],
    )
    def test_optimizers_of_whole_tensors_are_refused_on_slices(self, keys, given, optimizer):
        error = refusal(**keys, optim=optimizer)
        assert error.given == f"optim={optimizer} and {given}"
        assert "looks at each parameter as a whole" in error.wrong
        assert "stage1 without split_param" in error.instead

    @pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
    def test_optimizers_of_whole_tensors_divide_by_tensors_or_not_at_all(self, optimizer):
        assert resolve(**STAGE1, optim=optimizer).ownership is Ownership.TENSORS
        assert resolve(sharding="stage2", optim=optimizer).ownership is Ownership.REPLICATED
        assert resolve(optim=optimizer, **TWO_REPLICAS).warnings == ()

    @pytest.mark.parametrize(
        "flag", ["enable_sharding_comm_overlap", "enable_stage1_overlap", "enable_dp_comm_overlap"]
    )
    def test_overlap_by_any_of_its_names_contradicts_after_accumulation(self, flag):
        config = "data_parallel_config" if flag == "enable_dp_comm_overlap" else "sharding_parallel_config"
        error = refusal(**{**STAGE1, "gradient_sync": "after_accumulation"}, **{config: flag})
        assert error.given == f"{config}={flag} and gradient_sync=after_accumulation"
        assert "no backward is left to overlap with" in error.wrong

    def test_an_overlap_of_another_stage_is_a_warning_after_accumulation_too(self):
        keys = {**STAGE1, "gradient_sync": "after_accumulation", "sharding_parallel_config": "enable_stage2_overlap"}
        assert "enable_stage2_overlap has no effect here: it needs sharding: stage2." in resolve(**keys).warnings

    def test_stage2s_overlap_contradicts_after_accumulation(self):
        keys = {**STAGE2, "gradient_sync": "after_accumulation", "sharding_parallel_config": "enable_stage2_overlap"}
        assert "enable_stage2_overlap" in refusal(**keys).given

    @pytest.mark.parametrize(
        ("keys", "flag", "key"),
        [
            (STAGE1, "enable_sharding_comm_overlap", "overlap_gradient_reduction"),
            (STAGE1, "enable_stage1_overlap", "overlap_gradient_reduction"),
            (STAGE2, "enable_stage2_overlap", "overlap_gradient_reduction"),
            (STAGE1, "enable_stage1_broadcast_overlap", "overlap_parameter_gather"),
            (STAGE1, "split_param enable_stage1_allgather_overlap", "overlap_parameter_gather"),
        ],
    )
    def test_a_flag_against_its_key_is_refused(self, keys, flag, key):
        error = refusal(**{**keys, "sharding_parallel_config": flag, key: False})
        assert error.given == f"{key}=false and sharding_parallel_config={flag.split()[-1]}"
        assert error.wrong == f"the flag means {key}: true"

    def test_gathers_overlap_unless_told_otherwise(self):
        assert resolve(**STAGE1).overlap_gathers
        assert not resolve(**STAGE1, overlap_parameter_gather=False).overlap_gathers
        assert resolve(**STAGE1, overlap_parameter_gather=True).overlap_gathers

    def test_the_size_of_buckets(self):
        assert resolve(**STAGE1, gradient_bucket_size_MB=0.5).bucket_bytes == 2**19
        assert resolve(**STAGE1, sharding_comm_buffer_size_MB=3).bucket_bytes == 3 * 2**20
        assert resolve(**TWO_REPLICAS, sharding_comm_buffer_size_MB=3).bucket_bytes == 25 * 2**20
        (warning,) = resolve(**STAGE1, sharding_comm_buffer_size_MB=3, gradient_bucket_size_MB=0.5).warnings
        assert warning == "gradient_bucket_size_MB has no effect here: sharding_comm_buffer_size_MB decides."

    @pytest.mark.parametrize(
        "keys",
        [
            {"sharding": "stage2"},
            {"sharding": "stage3"},
            {"sharding": "stage1", "sharding_parallel_config": "free_grads_in_comm"},
        ],
    )
    def test_whole_gradients_that_accumulate_by_default_are_a_warning(self, keys):
        keys = {**keys, "sharding_parallel_degree": 2}
        (warning,) = resolve(**keys, gradient_accumulation_steps=4).warnings
        assert "gradient_sync: every_micro_batch" in warning
        assert resolve(**keys).warnings == ()
        for moment in ("every_micro_batch", "last_micro_batch", "after_accumulation"):
            assert resolve(**keys, gradient_accumulation_steps=4, gradient_sync=moment).warnings == ()


class TestPrecision:
    @pytest.mark.parametrize(
        ("keys", "dtypes"),
        [
            ({}, ("float32", "float32", "float32")),
            ({"bf16": True}, ("bfloat16", "float32", "float32")),
            ({"bf16": True, "amp_master_grad": False}, ("bfloat16", "bfloat16", "bfloat16")),
            ({"bf16": True, "gradient_reduce_dtype": "bfloat16"}, ("bfloat16", "float32", "bfloat16")),
            ({"dtype": "float64"}, ("float64", "float64", "float64")),
            ({"fp16": True}, ("float16", "float32", "float32")),
            ({"fp16": True, "amp_master_grad": False}, ("float16", "float16", "float16")),
            ({"fp16": True, "gradient_reduce_dtype": "bfloat16"}, ("float16", "float32", "bfloat16")),
        ],
    )
    def test_dtypes(self, keys, dtypes):
        strategy = resolve(**TWO_REPLICAS, **keys)
        assert (strategy.parameter_dtype, strategy.gradient_dtype, strategy.reduce_dtype) == dtypes
        assert strategy.scales_loss == (dtypes[0] == "float16")
        assert strategy.warnings == ()

    def test_what_makes_no_sense_is_refused(self):
        assert "O2" in refusal(bf16=True, fp16_opt_level="O1").instead
        assert "float16" in refusal(fp16=True, fp16_opt_level="O1").wrong
        assert "float64" in refusal(gradient_reduce_dtype="float64").given


class TestOffload:
    def test_key_and_flag_are_one(self):
        flag = {**TWO_STAGES, "pipeline_parallel_config": "enable_offload_queue"}
        assert resolve(**flag).offload_activations
        assert resolve(offload_activations=True).offload_activations
        assert not resolve(**TWO_STAGES).offload_activations
        assert refusal(**flag, offload_activations=False).wrong == "the flag means offload_activations: true"

    def test_halved_backwards_make_it_save_less(self):
        (warning,) = resolve(**TWO_STAGES, pipeline_schedule_mode="ZBH1", offload_activations=True).warnings
        assert warning.startswith("offload_activations saves less under ZBH1: between the halves")
        assert resolve(**TWO_STAGES, offload_activations=True, recompute=True).warnings == ()


def test_recomputing_scores_alone_is_refused():
    assert "full_attn" in refusal(recompute=True, recompute_granularity="core_attn").instead


class TestPipeline:
    @pytest.mark.parametrize(
        ("flags", "exchange"),
        [
            ("", ShapeExchange.ONCE),
            ("enable_clear_every_step_cache", ShapeExchange.EACH_STEP),
            ("disable_p2p_cache_shape", ShapeExchange.EVERY_MESSAGE),
            ("disable_p2p_cache_shape enable_clear_every_step_cache", ShapeExchange.EVERY_MESSAGE),
        ],
    )
    def test_shape_exchange(self, flags, exchange):
        strategy = resolve(**TWO_STAGES, pipeline_parallel_config=flags)
        assert strategy.shape_exchange is exchange
        assert len(strategy.warnings) == (len(flags.split()) == 2)

    def test_schedule_and_timers(self):
        strategy = resolve(**TWO_STAGES, pipeline_schedule_mode="FThenB", pipeline_parallel_config="enable_timer")
        assert (strategy.schedule, strategy.timers) == ("FThenB", True)

    def test_flags_that_mean_a_schedule(self):
        halved = {**TWO_STAGES, "pipeline_parallel_config": "enable_split_backward"}
        assert resolve(**halved, virtual_pp_degree=2).schedule == "ZBH1"
        (warning,) = resolve(**halved, pipeline_schedule_mode="ZBV").warnings
        assert warning == "enable_split_backward has no effect here: ZBV halves backwards anyway."
        assert "ZBH1" in refusal(**halved, pipeline_schedule_mode="FThenB").instead
        error = refusal(**TWO_STAGES, pipeline_schedule_mode="ZBH1", pipeline_parallel_config="use_dualpipev")
        assert error.given == "pipeline_parallel_config=use_dualpipev and pipeline_schedule_mode=ZBH1"

    def test_nothing_comes_ahead_of_its_shape(self):
        flags = "enable_overlap_p2p_comm disable_p2p_cache_shape"
        (warning,) = resolve(**TWO_STAGES, pipeline_parallel_config=flags).warnings
        assert warning.startswith("enable_overlap_p2p_comm has no effect here: disable_p2p_cache_shape")

    def test_stages_on_a_rank(self):
        placement = resolve(**TWO_STAGES, virtual_pp_degree=3).placement
        assert [placement.stages_at(position) for position in range(2)] == [(0, 2, 4), (1, 3, 5)]
        assert resolve(virtual_pp_degree=3).placement.stages == 1

    @pytest.mark.parametrize("schedule", ["ZBV", "DualPipeV", "BoundedV"])
    def test_down_the_ranks_and_up_again(self, schedule):
        placement = resolve(**TWO_STAGES, pipeline_schedule_mode=schedule).placement
        assert [placement.stages_at(position) for position in range(2)] == [(0, 3), (1, 2)]
        assert placement == resolve(**TWO_STAGES, pipeline_schedule_mode=schedule, virtual_pp_degree=2).placement
        error = refusal(**TWO_STAGES, pipeline_schedule_mode=schedule, virtual_pp_degree=3)
        assert error.given == f"pipeline_schedule_mode={schedule} and virtual_pp_degree=3"

    def test_a_limit_of_activations_counts_those_at_every_stage(self):
        keys = {**TWO_STAGES, "pipeline_schedule_mode": "Bounded"}
        assert resolve(**keys).most_activations == 2
        assert resolve(**keys, virtual_pp_degree=3).most_activations == 6
        assert resolve(**keys, virtual_pp_degree=3, pipeline_activation_limit=1.5).most_activations == 4
        assert resolve(**keys, virtual_pp_degree=3, pipeline_activation_limit=1).most_activations == 3

    def test_the_best_schedule_decides_itself_whether_to_halve(self):
        keys = {**TWO_STAGES, "pipeline_schedule_mode": "best", "pipeline_parallel_config": "enable_split_backward"}
        strategy = resolve(**keys)
        assert strategy.schedule == BEST
        assert strategy.warnings == (
            "enable_split_backward has no effect here: the best schedule is found among halved and whole backwards.",
        )

    def test_interleaving_one_stage_is_refused(self):
        error = refusal(**TWO_STAGES, pipeline_schedule_mode="VPP")
        assert error.given == "pipeline_schedule_mode=VPP and virtual_pp_degree=1"
        assert "virtual_pp_degree: 2" in error.instead


CHANGED_BY: dict[str, dict[str, Any]] = {
    "gradient_sync_after_accumulate": {"sync": SyncMoment.AFTER_ACCUMULATION, "overlap": False},
    "enable_allreduce_avg_in_gradient_scale": {"average_in_collective": True},
    "enable_dp_comm_overlap": {"overlap": True},
    "enable_delay_scale_loss": {"delay_loss_scale": True},
    "enable_release_grads": {"release_gradients": True},
    "enable_timer": {"timers": True},
    "enable_profiling": {"timers": True},
    "disable_p2p_cache_shape": {"shape_exchange": ShapeExchange.EVERY_MESSAGE},
    "enable_clear_every_step_cache": {"shape_exchange": ShapeExchange.EACH_STEP},
    "enable_overlap_p2p_comm": {"receive_ahead": True},
    "enable_send_recv_overlap": {"receive_ahead": True},
    "enable_offload_queue": {"offload_activations": True},
    "enable_split_backward": {"schedule": "ZBH1"},
    "use_dualpipev": {"schedule": "DualPipeV", "virtual_stages": 2, "placement": Placement(2, 2, folded=True)},
    "split_param": {"sharding": Sharding.STAGE1_SLICE, "ownership": Ownership.SLICES},
    "enable_sharding_comm_overlap": {"overlap": True},
    "enable_stage1_overlap": {"overlap": True},
    "enable_stage2_overlap": {"overlap": True},
    "enable_stage1_broadcast_overlap": {"overlap_gathers": True},
    "enable_stage1_allgather_overlap": {"overlap_gathers": True},
    "free_grads_in_comm": {"free_in_communication": True, "frees_reduced_gradients": True},
    "use_reduce_avg": {"average_in_collective": True},
}
"""What each effective flag decides."""


NEEDED: dict[Need, dict[str, Any]] = {
    Need.NOTHING: {},
    Need.REPLICAS: TWO_REPLICAS,
    Need.STAGES: TWO_STAGES,
    Need.SHARDING: STAGE2,
    Need.STAGE1: STAGE1,
    Need.BY_TENSORS: STAGE1,
    Need.BY_SLICES: BY_SLICES,
    Need.STAGE2: STAGE2,
}
"""A job in which the need is met; that for tensor slices never is yet."""

NOT_NEEDED: dict[Need, list[dict[str, Any]]] = {
    Need.SHARDING: [{}, BOTH, {"sharding": "stage1"}, {"sharding_parallel_degree": 2}],
    Need.STAGE1: [STAGE2, STAGE3, {"sharding": "stage1"}],
    Need.BY_TENSORS: [BY_SLICES, STAGE2, STAGE3],
    Need.BY_SLICES: [STAGE1, STAGE2, STAGE3],
    Need.STAGE2: [STAGE1, BY_SLICES, STAGE3],
}
"""Jobs in which it is not."""

OF_SHARDING = (Need.SHARDING, Need.STAGE1, Need.BY_TENSORS, Need.BY_SLICES, Need.STAGE2)


def with_flag(keys: dict[str, Any], config: str, flag: str) -> dict[str, Any]:
    return {**keys, config: f"{keys.get(config, '')} {flag}".strip()}


def decisions(strategy: Strategy) -> tuple[Any, ...]:
    """Everything that acts; what is to be divided does not where there is only one rank."""
    divided = (strategy.ownership, strategy.shards, strategy.divides_parameters, strategy.frees_reduced_gradients)
    return (replace(strategy, sharding=Sharding.NONE, warnings=()), *divided)


class TestEveryFlag:
    def test_the_effective_flags_are_those_that_decide_something(self):
        assert {flag.name for flag in FLAGS if flag.status is Status.EFFECTIVE} == set(CHANGED_BY)

    @pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
    def test_acts_warns_or_is_refused_with_two_replicas_and_two_stages(self, flag):
        for config in flag.configs:
            keys = {**BOTH, config: flag.name}
            if flag.needs in (*OF_SHARDING, Need.SLICES) or flag.status is Status.NO_EFFECT:
                (warning,) = resolve(**keys).warnings
                assert warning.startswith(f"{flag.name} has no effect here: ")
            elif flag.status is Status.EFFECTIVE:
                strategy = resolve(**keys)
                assert strategy.warnings == ()
                assert {name: getattr(strategy, name) for name in CHANGED_BY[flag.name]} == CHANGED_BY[flag.name]
            else:
                error = refusal(**keys)
                assert error.given == f"{config}={flag.name}"
                assert flag.status is not Status.ARRIVES or error.wrong == str(flag.arrives)

    @pytest.mark.parametrize("flag", [f for f in FLAGS if f.needs in NEEDED], ids=lambda flag: flag.name)
    def test_acts_warns_or_is_refused_where_its_need_is_met(self, flag):
        for config in flag.configs:
            keys = with_flag(NEEDED[flag.needs], config, flag.name)
            if flag.status is Status.EFFECTIVE:
                strategy = resolve(**keys)
                assert strategy.warnings == ()
                assert {name: getattr(strategy, name) for name in CHANGED_BY[flag.name]} == CHANGED_BY[flag.name]
            elif flag.status is Status.NO_EFFECT:
                (warning,) = resolve(**keys).warnings
                assert warning == f"{flag.name} has no effect here: {flag.no_effect}."
            else:
                assert refusal(**keys).given == f"{config}={flag.name}"

    @pytest.mark.parametrize("flag", [f for f in FLAGS if f.needs in NOT_NEEDED], ids=lambda flag: flag.name)
    def test_of_sharding_warns_where_its_need_is_not_met(self, flag):
        for keys in NOT_NEEDED[flag.needs]:
            before = resolve(**keys)
            after = resolve(**with_flag(keys, "sharding_parallel_config", flag.name))
            added = [warning for warning in after.warnings if warning not in before.warnings]
            later = f" (it {flag.arrives})" if flag.arrives else ""
            assert added == [f"{flag.name} has no effect here: it needs {flag.needs.value}{later}."]
            assert decisions(after) == decisions(before)

    @pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
    def test_warns_on_one_rank_unless_it_needs_nothing(self, flag):
        warnings = resolve(**{flag.configs[0]: flag.name}).warnings
        assert [warning.split(":")[0] for warning in warnings] == (
            [] if flag.needs is Need.NOTHING else [f"{flag.name} has no effect here"]
        )


REFUSED_NOW = {
    "sharding": "stage2 offload",
    "tensor_parallel_degree": 2,
    "sep_parallel_degree": 2,
    "save_strategy": "steps",
    "save_steps": 100,
    "resume_from_checkpoint": "outputs/checkpoint-5",
    "load_best_model_at_end": True,
}


class TestNotYet:
    def test_the_examples_cover_the_table(self):
        assert set(REFUSED_NOW) == {entry.option for entry in UNSUPPORTED}

    @pytest.mark.parametrize(("option", "value"), REFUSED_NOW.items())
    def test_is_refused_with_what_to_use_now(self, option, value):
        error = refusal(**{option: value})
        assert error.given == f"{option}={value}"
        assert error.wrong.startswith("arrives with ")
        assert len(error.instead) > 20

    def test_offload_is_named(self):
        assert refusal(sharding="stage1 offload", **TWO_REPLICAS).wrong == "arrives with offloading"


RANDOM_TOKENS = {"train_data": "random-tokens"}

WITHOUT_EFFECT: list[tuple[dict[str, Any], str]] = [
    ({"gradient_sync": "every_micro_batch", "gradient_accumulation_steps": 2}, "gradient_sync"),
    ({"gradient_sync": "every_micro_batch", "data_parallel_degree": 2}, "gradient_sync"),
    ({"overlap_gradient_reduction": False}, "overlap_gradient_reduction"),
    ({"gradient_reduce_dtype": "bfloat16"}, "gradient_reduce_dtype"),
    ({"hybrid_parallel_topo_order": "sharding_first"}, "hybrid_parallel_topo_order"),
    ({"pipeline_schedule_mode": "FThenB"}, "pipeline_schedule_mode"),
    ({"pipeline_schedule_mode": "FThenB", "pipeline_parallel_degree": 2}, "pipeline_schedule_mode"),
    ({"recompute_granularity": "full_attn"}, "recompute_granularity"),
    ({"recompute_interval": 2}, "recompute_interval"),
    ({"pp_seg_method": "layer:Decoder"}, "pp_seg_method"),
    ({"virtual_pp_degree": 2}, "virtual_pp_degree"),
    ({"pipeline_activation_limit": 3}, "pipeline_activation_limit"),
    ({**TWO_STAGES, "pipeline_activation_limit": 3}, "pipeline_activation_limit"),
    ({"virtual_pp_degree": 2, "pipeline_schedule_mode": "VPP"}, "pipeline_schedule_mode"),
    ({"nproc_per_node": 2, "world_size": 8}, "nproc_per_node"),
    ({"progress": "none", "logging_steps": 1}, "logging_steps"),
    ({"sequence_parallel": True}, "sequence_parallel"),
    ({"sharding_comm_buffer_size_MB": 100}, "sharding_comm_buffer_size_MB"),
    ({"sharding": "stage1"}, "sharding"),
    ({"sharding": "stage3", "nproc_per_node": 2, "pipeline_parallel_degree": 2}, "sharding"),
    ({"sharding_parallel_degree": 2}, "sharding_parallel_degree"),
    ({**STAGE1, "sharding_comm_buffer_size_MB": 100, "gradient_bucket_size_MB": 3}, "gradient_bucket_size_MB"),
    ({"overlap_parameter_gather": False, **TWO_REPLICAS}, "overlap_parameter_gather"),
    ({"overlap_parameter_gather": False, "sharding_parallel_degree": 2}, "overlap_parameter_gather"),
    ({"overlap_parameter_gather": True, "sharding": "stage1"}, "overlap_parameter_gather"),
    ({"overlap_parameter_gather": False, **STAGE3}, "overlap_parameter_gather"),
    ({"scale_loss": 1024.0}, "scale_loss"),
    ({"scale_loss": 1024.0, "bf16": True}, "scale_loss"),
    ({"amp_master_grad": True}, "amp_master_grad"),
    ({"fp16_opt_level": "O1"}, "fp16_opt_level"),
    ({"max_steps": 3, "num_train_epochs": 2}, "num_train_epochs"),
    ({"warmup_steps": 3, "warmup_ratio": 0.1}, "warmup_ratio"),
    ({"warmup_steps": 3, "lr_scheduler_type": "constant"}, "warmup_steps"),
    ({"warmup_ratio": 0.1, "lr_scheduler_type": "constant"}, "warmup_ratio"),
    ({"min_learning_rate": 1e-6, "lr_scheduler_type": "constant_with_warmup"}, "min_learning_rate"),
    ({"lr_scheduler_power": 2.0}, "lr_scheduler_power"),
    ({"optim": "sgd", "adam_beta1": 0.8}, "adam_beta1"),
    ({"optim": "sgd", "adam_beta2": 0.8}, "adam_beta2"),
    ({"optim": "sgd", "adam_epsilon": 1e-6}, "adam_epsilon"),
    ({"optim": "adafactor", "adam_epsilon": 1e-6}, "adam_epsilon"),
    ({"optim": "adamw", "adafactor_epsilon": 1e-2}, "adafactor_epsilon"),
    ({"optim": "adamw", "muon_momentum": 0.5}, "muon_momentum"),
    ({"parameter_groups": [{"pattern": "norm"}]}, "parameter_groups"),
    ({"validation_split": 0.1, "validation_data": "a.txt"}, "validation_split"),
    ({"random_token_samples": 3}, "random_token_samples"),
    ({**RANDOM_TOKENS, "tokenizer_name_or_path": "train-bpe:300"}, "tokenizer_name_or_path"),
    ({**RANDOM_TOKENS, "text_field": "body"}, "text_field"),
    ({"train_data": "python-stdlib", "text_field": "body"}, "text_field"),
    ({**RANDOM_TOKENS, "max_data_bytes": 1000}, "max_data_bytes"),
    ({**RANDOM_TOKENS, "data_cache_folder": "cache"}, "data_cache_folder"),
    ({**RANDOM_TOKENS, "isolate_documents": True}, "isolate_documents"),
    ({**RANDOM_TOKENS, "sample_tokens": 20}, "sample_tokens"),
    ({**RANDOM_TOKENS, "sample_tokens": 20, "sample_prompt": "def"}, "sample_prompt"),
    ({"eval_steps": 3, "validation_split": 0}, "eval_steps"),
    ({"eval_steps": 3, "max_steps": 3}, "eval_steps"),
    ({"eval_steps": 3, "max_steps": 3, "early_stopping_patience": 1}, "early_stopping_patience"),
    ({"per_device_eval_batch_size": 3, "validation_split": 0}, "per_device_eval_batch_size"),
    ({"early_stopping_patience": 3}, "early_stopping_patience"),
    ({"early_stopping_patience": 3, "eval_steps": 3, "validation_split": 0}, "early_stopping_patience"),
    ({"sample_prompt": "def"}, "sample_prompt"),
    ({"save_strategy": "no", "save_steps": 5}, "save_steps"),
    ({"save_total_limit": 5}, "save_total_limit"),
    ({"save_strategy": "no", "save_steps": 5, "save_total_limit": 5}, "save_total_limit"),
]

WITH_EFFECT: list[dict[str, Any]] = [
    {**RANDOM_TOKENS, "random_token_samples": 3, "model_name_or_path": "gpt2"},
    {"train_data": "a.jsonl", "text_field": "body", "max_data_bytes": 10, "sample_tokens": 3, "sample_prompt": "def"},
    {"train_data": "python-stdlib", "validation_data": "a.jsonl", "text_field": "body"},
    {"eval_steps": 3, "max_steps": 4, "early_stopping_patience": 1, "per_device_eval_batch_size": 3},
    {"nproc_per_node": 2, "world_size": 2},
    {"progress": "plain", "logging_steps": 1},
    {**TWO_STAGES, "pipeline_schedule_mode": "FThenB", "virtual_pp_degree": 3},
    {"pipeline_parallel_degree": 2, "virtual_pp_degree": 2, "pipeline_schedule_mode": "VPP"},
    {"pipeline_parallel_degree": 2, "pipeline_schedule_mode": "ZBH1", "pp_seg_method": "3,5"},
    {"pipeline_parallel_degree": 2, "pipeline_schedule_mode": "ZBV"},
    {"recompute": True, "recompute_granularity": "full_attn", "recompute_interval": 2},
    {"offload_activations": True},
    {"pipeline_parallel_degree": 2, "pipeline_schedule_mode": "DualPipeV", "virtual_pp_degree": 2},
    {"warmup_steps": 3, "lr_scheduler_type": "constant_with_warmup"},
    {"min_learning_rate": 1e-6, "lr_scheduler_power": 2.0, "lr_scheduler_type": "polynomial"},
    {**STAGE1, "sharding_comm_buffer_size_MB": 100, "overlap_parameter_gather": False},
    {**STAGE2, "gradient_bucket_size_MB": 3.0, "overlap_parameter_gather": True, "gradient_reduce_dtype": "bfloat16"},
    {**STAGE3, "overlap_gradient_reduction": False, "release_grads": True},
    {"fp16": True, "scale_loss": 1024.0, "amp_master_grad": False, "fp16_opt_level": "O2"},
    {"optim": "muon", "muon_momentum": 0.9, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6},
    {"optim": "adafactor", "adafactor_epsilon": 1e-2},
    {"parameter_groups": [{"pattern": "norm", "weight_decay": 0.1}]},
]


class TestNoEffect:
    @pytest.mark.parametrize(("keys", "option"), WITHOUT_EFFECT)
    def test_is_a_warning(self, keys, option):
        warnings = resolve(**keys).warnings
        assert any(warning.startswith(f"{option} has no effect here: ") for warning in warnings)

    @pytest.mark.parametrize("keys", WITH_EFFECT)
    def test_what_has_an_effect_is_no_warning(self, keys):
        assert resolve(**keys).warnings == ()

    def test_the_examples_cover_the_table(self):
        assert {option for _, option in WITHOUT_EFFECT} == {entry.option for entry in INEFFECTIVE}
        assert all(entry.option in OPTIONS for entry in INEFFECTIVE)

    def test_notices_of_foreign_keys_are_among_the_warnings(self):
        (warning,) = resolve(do_train=True).warnings
        assert warning.startswith("do_train means nothing here")
