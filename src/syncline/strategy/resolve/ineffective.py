"""Options that change nothing in the company of others: one table, and its warnings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from syncline.arguments import OPTIONS, TrainingArguments
from syncline.strategy.topology import Topology


@dataclass(frozen=True)
class Ineffective:
    """When an option that is not at its default changes nothing, and why."""

    option: str
    when: Callable[[TrainingArguments, Topology], bool]
    because: str


def _one_stage(arguments: TrainingArguments, topology: Topology) -> bool:
    return topology.pp == 1


def _one_replica(arguments: TrainingArguments, topology: Topology) -> bool:
    return topology.replicas == 1


def _constant(arguments: TrainingArguments, topology: Topology) -> bool:
    return arguments.lr_scheduler_type.startswith("constant")


def _no_evaluation(arguments: TrainingArguments, topology: Topology) -> bool:
    return not arguments.validation_data and arguments.validation_split == 0


def _all_random(arguments: TrainingArguments, topology: Topology) -> bool:
    return arguments.train_data == ("random-tokens",)


def _no_field(arguments: TrainingArguments, topology: Topology) -> bool:
    named = {*arguments.train_data, *arguments.validation_data}
    return bool(named) and named <= {"random-tokens", "python-stdlib"}


def _unused_tokenizer(arguments: TrainingArguments, topology: Topology) -> bool:
    """Whether a tokenizer that was asked for (by itself it follows the model) has nothing to read."""
    return _all_random(arguments, topology) and arguments.tokenizer_name_or_path != (
        arguments.model_name_or_path or "byte"
    )


def _ends_first(arguments: TrainingArguments, topology: Topology) -> bool:
    return arguments.eval_steps is not None and 0 < arguments.max_steps <= arguments.eval_steps


def _in_16_bits(arguments: TrainingArguments) -> bool:
    return arguments.dtype in ("bfloat16", "float16")


def _not_adam(arguments: TrainingArguments, topology: Topology) -> bool:
    return arguments.optim not in ("adamw", "muon")


def _groups_set_nothing(arguments: TrainingArguments, topology: Topology) -> bool:
    return all(set(group) == {"pattern"} for group in arguments.parameter_groups)


INEFFECTIVE = (
    Ineffective("gradient_sync", _one_replica, "there is one data-parallel replica, so nothing is reduced"),
    Ineffective(
        "gradient_sync",
        lambda a, t: a.gradient_sync == "every_micro_batch" and a.gradient_accumulation_steps == 1,
        "with gradient_accumulation_steps 1 the only micro-batch is the last one",
    ),
    Ineffective(
        "overlap_gradient_reduction", _one_replica, "there is one data-parallel replica, so nothing is reduced"
    ),
    Ineffective("gradient_reduce_dtype", _one_replica, "there is one data-parallel replica, so nothing is reduced"),
    Ineffective(
        "hybrid_parallel_topo_order",
        lambda a, t: t.pp == 1 or t.replicas == 1,
        "ranks lie along one axis only, so there is one order",
    ),
    Ineffective("pipeline_schedule_mode", _one_stage, "one stage runs each micro-batch forward, then backward"),
    Ineffective("pipeline_activation_limit", _one_stage, "one stage runs each micro-batch forward, then backward"),
    Ineffective(
        "pipeline_activation_limit",
        lambda a, t: t.pp > 1 and a.pipeline_schedule_mode not in ("Bounded", "BoundedV", "best"),
        "the schedule decides what is held; pipeline_schedule_mode: best keeps the limit",
    ),
    Ineffective("pp_seg_method", _one_stage, "one stage has all layers"),
    Ineffective("virtual_pp_degree", _one_stage, "pipeline_parallel_degree is 1, and one rank has nobody to wait for"),
    Ineffective(
        "pipeline_schedule_mode",
        lambda a, t: t.pp > 1 and a.gradient_accumulation_steps == 1 and a.pipeline_schedule_mode == "FThenB",
        "a single micro-batch has one order",
    ),
    Ineffective(
        "nproc_per_node",
        lambda a, t: a.world_size not in (None, a.nproc_per_node),
        "world_size decides the number of ranks",
    ),
    Ineffective(
        "sequence_parallel",
        lambda a, t: t.tp == 1,
        "tensor_parallel_degree is 1; it arrives with tensor parallelism",
    ),
    Ineffective(
        "sharding_comm_buffer_size_MB",
        lambda a, t: not a.sharding,
        "nothing is sharded; gradient_bucket_size_MB counts",
    ),
    Ineffective(
        "sharding",
        lambda a, t: t.sharding == 1 and t.dp == 1,
        "there is only one rank to divide among",
    ),
    Ineffective(
        "sharding",
        lambda a, t: t.sharding == 1 and t.dp > 1,
        "data_parallel_degree keeps all replicas whole; sharding_parallel_degree divides among so many",
    ),
    Ineffective(
        "sharding_parallel_degree",
        lambda a, t: t.sharding > 1 and not a.sharding,
        "nothing is sharded, so its ranks are plain replicas; sharding: stage1 would divide the optimizer state",
    ),
    Ineffective(
        "gradient_bucket_size_MB",
        lambda a, t: bool(a.sharding) and a.sharding_comm_buffer_size_MB is not None,
        "sharding_comm_buffer_size_MB decides",
    ),
    Ineffective(
        "overlap_parameter_gather",
        lambda a, t: t.sharding == 1 or not a.sharding,
        "nothing is sharded, so no parameters are gathered",
    ),
    Ineffective(
        "overlap_parameter_gather",
        lambda a, t: t.sharding > 1 and "stage3" in a.sharding,
        "stage 3 gathers parameters around their use",
    ),
    Ineffective("scale_loss", lambda a, t: a.dtype != "float16", "losses are scaled up only under float16"),
    Ineffective("amp_master_grad", lambda a, t: not _in_16_bits(a), "only parameters in 16 bits need master gradients"),
    Ineffective("fp16_opt_level", lambda a, t: not _in_16_bits(a), "parameters are not in 16 bits"),
    Ineffective("recompute_granularity", lambda a, t: not a.recompute, "recompute is false"),
    Ineffective("recompute_interval", lambda a, t: not a.recompute, "recompute is false"),
    Ineffective("num_train_epochs", lambda a, t: a.max_steps > 0, "max_steps decides how long training takes"),
    Ineffective("warmup_ratio", lambda a, t: a.warmup_steps > 0, "warmup_steps decides the warm-up"),
    Ineffective("warmup_steps", lambda a, t: a.lr_scheduler_type == "constant", "the learning rate is constant"),
    Ineffective("warmup_ratio", lambda a, t: a.lr_scheduler_type == "constant", "the learning rate is constant"),
    Ineffective("min_learning_rate", _constant, "the learning rate does not fall"),
    Ineffective(
        "lr_scheduler_power", lambda a, t: a.lr_scheduler_type != "polynomial", "only a polynomial has a power"
    ),
    Ineffective("adam_beta1", _not_adam, "optim updates nothing by adamw"),
    Ineffective("adam_beta2", _not_adam, "optim updates nothing by adamw"),
    Ineffective("adam_epsilon", _not_adam, "optim updates nothing by adamw"),
    Ineffective("adafactor_epsilon", lambda a, t: a.optim != "adafactor", "optim is not adafactor"),
    Ineffective("muon_momentum", lambda a, t: a.optim != "muon", "optim is not muon"),
    Ineffective("parameter_groups", _groups_set_nothing, "no entry sets a learning_rate or a weight_decay"),
    Ineffective("validation_split", lambda a, t: bool(a.validation_data), "validation_data is given"),
    Ineffective("random_token_samples", lambda a, t: not _all_random(a, t), "train_data is not random-tokens"),
    Ineffective("tokenizer_name_or_path", _unused_tokenizer, "random-tokens has no text"),
    Ineffective("text_field", _no_field, "no data is read from JSONL files"),
    Ineffective(
        "max_data_bytes", _all_random, "random-tokens has no text; random_token_samples decides how much it is"
    ),
    Ineffective("data_cache_folder", _all_random, "random-tokens is made anew in every run"),
    Ineffective("isolate_documents", _all_random, "a sample of random-tokens is one document"),
    Ineffective("per_device_eval_batch_size", _no_evaluation, "there is no validation data"),
    Ineffective("eval_steps", _no_evaluation, "there is no validation data"),
    Ineffective("eval_steps", _ends_first, "max_steps ends training before, and the end is evaluated anyway"),
    Ineffective("early_stopping_patience", _no_evaluation, "there is no validation data"),
    Ineffective("early_stopping_patience", lambda a, t: a.eval_steps is None, "nothing is evaluated before the end"),
    Ineffective("early_stopping_patience", _ends_first, "nothing is evaluated before the end"),
    Ineffective("sample_tokens", _all_random, "random-tokens has no text, hence no tokenizer"),
    Ineffective("sample_prompt", _all_random, "random-tokens has no text, hence no tokenizer"),
    Ineffective("sample_prompt", lambda a, t: a.sample_tokens == 0, "sample_tokens is 0"),
    Ineffective(
        "logging_steps", lambda a, t: a.progress in ("rich", "none"), "only the plain progress prints a line a step"
    ),
    Ineffective("save_steps", lambda a, t: a.save_strategy == "no", "save_strategy is no"),
    Ineffective("save_total_limit", lambda a, t: True, "no checkpoint is written"),
)


def ineffective_warnings(arguments: TrainingArguments, topology: Topology) -> list[str]:
    """A sentence for every option that is not at its default and changes nothing."""
    return [
        f"{entry.option} has no effect here: {entry.because}."
        for entry in INEFFECTIVE
        if getattr(arguments, entry.option) != OPTIONS[entry.option].default and entry.when(arguments, topology)
    ]
