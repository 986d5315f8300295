"""From arguments to decisions: what acts, what warns and what is refused."""

from typing import Any

import pytest

from syncline.arguments import OPTIONS, arguments_from_mapping
from syncline.arguments.flags import FLAGS, Need, Status
from syncline.errors import UserError
from syncline.no_effect import NO_EFFECT
from syncline.not_yet import NOT_YET
from syncline.strategy import Normalization, ShapeExchange, Strategy, SyncMoment, resolve_strategy
from syncline.topology import Topology

TWO_REPLICAS = {"data_parallel_degree": 2, "gradient_accumulation_steps": 4}
TWO_STAGES = {"pipeline_parallel_degree": 2, "gradient_accumulation_steps": 4}
BOTH = {**TWO_REPLICAS, **TWO_STAGES}


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


class TestPrecision:
    @pytest.mark.parametrize(
        ("keys", "dtypes"),
        [
            ({}, ("float32", "float32", "float32")),
            ({"bf16": True}, ("bfloat16", "float32", "float32")),
            ({"bf16": True, "amp_master_grad": False}, ("bfloat16", "bfloat16", "bfloat16")),
            ({"bf16": True, "gradient_reduce_dtype": "bfloat16"}, ("bfloat16", "float32", "bfloat16")),
            ({"dtype": "float64"}, ("float64", "float64", "float64")),
        ],
    )
    def test_dtypes(self, keys, dtypes):
        strategy = resolve(**TWO_REPLICAS, **keys)
        assert (strategy.parameter_dtype, strategy.gradient_dtype, strategy.reduce_dtype) == dtypes

    def test_what_makes_no_sense_is_refused(self):
        assert "O2" in refusal(bf16=True, fp16_opt_level="O1").instead
        assert "float64" in refusal(gradient_reduce_dtype="float64").given


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
}
"""What each effective flag decides."""


class TestEveryFlag:
    def test_the_effective_flags_are_those_that_decide_something(self):
        assert {flag.name for flag in FLAGS if flag.status is Status.EFFECTIVE} == set(CHANGED_BY)

    @pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
    def test_acts_warns_or_is_refused_with_two_replicas_and_two_stages(self, flag):
        for config in flag.configs:
            keys = {**BOTH, config: flag.name}
            if flag.needs in (Need.SHARDING, Need.SLICES) or flag.status is Status.NO_EFFECT:
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

    @pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
    def test_warns_on_one_rank_unless_it_needs_nothing(self, flag):
        warnings = resolve(**{flag.configs[0]: flag.name}).warnings
        assert [warning.split(":")[0] for warning in warnings] == (
            [] if flag.needs is Need.NOTHING else [f"{flag.name} has no effect here"]
        )


REFUSED_NOW = {
    "sharding": "stage1",
    "sharding_parallel_degree": 2,
    "tensor_parallel_degree": 2,
    "sep_parallel_degree": 2,
    "virtual_pp_degree": 2,
    "pipeline_schedule_mode": "ZBH1",
    "dtype": "float16",
    "recompute_granularity": "core_attn",
    "save_strategy": "steps",
    "save_steps": 100,
    "resume_from_checkpoint": "outputs/checkpoint-5",
    "load_best_model_at_end": True,
}


class TestNotYet:
    def test_the_examples_cover_the_table(self):
        assert set(REFUSED_NOW) == {entry.option for entry in NOT_YET}

    @pytest.mark.parametrize(("option", "value"), REFUSED_NOW.items())
    def test_is_refused_with_what_to_use_now(self, option, value):
        error = refusal(**{option: value})
        assert error.given == f"{option}={value}"
        assert error.wrong.startswith("arrives with ")
        assert len(error.instead) > 20

    def test_offload_and_fp16(self):
        assert refusal(sharding="stage2 offload").wrong == "arrives with offloading"
        assert refusal(fp16=True).wrong == "arrives with fp16"


RANDOM_TOKENS = {"train_data": "random-tokens"}

WITHOUT_EFFECT: list[tuple[dict[str, Any], str]] = [
    ({"gradient_sync": "every_micro_batch", "gradient_accumulation_steps": 2}, "gradient_sync"),
    ({"gradient_sync": "every_micro_batch", "data_parallel_degree": 2}, "gradient_sync"),
    ({"overlap_gradient_reduction": False}, "overlap_gradient_reduction"),
    ({"gradient_reduce_dtype": "bfloat16"}, "gradient_reduce_dtype"),
    ({"hybrid_parallel_topo_order": "sharding_first"}, "hybrid_parallel_topo_order"),
    ({"pipeline_schedule_mode": "FThenB"}, "pipeline_schedule_mode"),
    ({"pipeline_schedule_mode": "FThenB", "pipeline_parallel_degree": 2}, "pipeline_schedule_mode"),
    ({"nproc_per_node": 2, "world_size": 8}, "nproc_per_node"),
    ({"progress": "none", "logging_steps": 1}, "logging_steps"),
    ({"sequence_parallel": True}, "sequence_parallel"),
    ({"sharding_comm_buffer_size_MB": 100}, "sharding_comm_buffer_size_MB"),
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
    {**TWO_STAGES, "pipeline_schedule_mode": "FThenB"},
    {"warmup_steps": 3, "lr_scheduler_type": "constant_with_warmup"},
    {"min_learning_rate": 1e-6, "lr_scheduler_power": 2.0, "lr_scheduler_type": "polynomial"},
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
        assert {option for _, option in WITHOUT_EFFECT} == {entry.option for entry in NO_EFFECT}
        assert all(entry.option in OPTIONS for entry in NO_EFFECT)

    def test_notices_of_foreign_keys_are_among_the_warnings(self):
        (warning,) = resolve(do_train=True).warnings
        assert warning.startswith("do_train means nothing here")
