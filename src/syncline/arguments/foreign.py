"""Keys and values of Hugging Face's and PaddleNLP's training arguments that are not Syncline's own.

Such a key is written differently here (`TRANSLATIONS`), asks for something that Syncline does not do (`REFUSALS`), or
means nothing here (`MEANINGLESS`): then it is a warning by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from syncline.arguments.values import read_boolean
from syncline.errors import UserError


@dataclass(frozen=True)
class Translation:
    """A key that is written differently here."""

    meaning: str
    keys: Callable[[str, Any], dict[str, Any]]
    """From the key's name and value to the keys of Syncline that say the same."""


@dataclass(frozen=True)
class Refusal:
    """A key that asks for something Syncline does not do, unless its value is one of `neutral`."""

    neutral: tuple[Any, ...]
    wrong: str
    instead: str


def _when_true(**keys: Any) -> Callable[[str, Any], dict[str, Any]]:
    return lambda name, value: dict(keys) if read_boolean(name, value) else {}


def _evaluation(name: str, value: Any) -> dict[str, Any]:
    if value is False or value == "no":
        return {"eval_steps": None}
    if value == "steps":
        return {}
    raise UserError(f"{name}={value}", "evaluation is counted in steps", "Write eval_steps: N, or leave it out.")


def _sampling(name: str, value: Any) -> dict[str, Any]:
    if value in ("random", "sequential"):
        return {"shuffle": value == "random"}
    raise UserError(
        f"{name}={value}", "samples are packed to one length, so there is nothing to group", "Write shuffle: true."
    )


def _warmup(name: str, value: Any) -> dict[str, Any]:
    return {"warmup_ratio": value} if _is_fraction(value) else {name: value}


def _is_fraction(value: Any) -> bool:
    """Whether a number, or the text of one as a command line gives it, lies between 0 and 1."""
    try:
        return 0 < float(value) < 1
    except (TypeError, ValueError):
        return False


TRANSLATIONS = {
    "bf16": Translation("`true` is dtype: bfloat16", _when_true(dtype="bfloat16")),
    "adafactor": Translation("`true` is optim: adafactor", _when_true(optim="adafactor")),
    "fp16": Translation("`true` is dtype: float16", _when_true(dtype="float16")),
    "disable_tqdm": Translation("`true` is progress: plain", _when_true(progress="plain")),
    "use_cpu": Translation("`true` is device: cpu", _when_true(device="cpu")),
    "no_cuda": Translation("`true` is device: cpu", _when_true(device="cpu")),
    "eval_strategy": Translation("`no` leaves eval_steps out; `steps` is what eval_steps says", _evaluation),
    "evaluation_strategy": Translation("as eval_strategy", _evaluation),
    "warmup_steps": Translation("a fraction is warmup_ratio", _warmup),
    "train_sampling_strategy": Translation("`random` is shuffle: true, `sequential` is shuffle: false", _sampling),
}

_USE_DEGREES = "Use the parallel degrees and sharding of Syncline."
_OFF: tuple[Any, ...] = (None, False, 0, "", "no", {}, [])

REFUSALS = {
    "accelerator_config": Refusal(_OFF, "Syncline has no accelerator", "Leave it out."),
    "average_tokens_across_devices": Refusal(
        (None, True, 1, "true", "True"),
        "a device's own mean is not offered",
        "Write gradient_normalization: micro_batch_mean for the mean of micro-batches, or leave it out.",
    ),
    "dataloader_drop_last": Refusal(_OFF, "a partial last step trains over its true tokens", "Leave it out."),
    "dataset_name_or_path": Refusal(_OFF, "instruction data sets are not offered", "Write train_data: PATH."),
    "deepspeed": Refusal(_OFF, "Syncline does not run on DeepSpeed", _USE_DEGREES),
    "enable_linear_fused_grad_add": Refusal(
        _OFF, "autograd adds gradients straight into their bucket already", "Leave it out."
    ),
    "fsdp": Refusal(_OFF, "Syncline does not run on FSDP", _USE_DEGREES),
    "fsdp_config": Refusal(_OFF, "Syncline does not run on FSDP", _USE_DEGREES),
    "group_by_length": Refusal(_OFF, "samples are packed to one length", "Leave it out."),
    "label_smoothing_factor": Refusal(_OFF, "the loss is plain cross entropy", "Leave it out or write 0."),
    "lr_scheduler_kwargs": Refusal(_OFF, "schedules have flat keys", "Write min_learning_rate and lr_scheduler_power."),
    "neftune_noise_alpha": Refusal(_OFF, "the embeddings get no noise", "Leave it out."),
    "decay_steps": Refusal(_OFF, "the learning rate falls until the last step", "Write max_steps."),
    "num_cycles": Refusal((None, 0.5), "a cosine schedule is half a wave", "Leave it out."),
    "offload_optim": Refusal(
        _OFF, "arrives with offloading", "Use offload_activations, recompute or enable_release_grads now."
    ),
    "optim_args": Refusal(_OFF, "the optimizer has flat keys", "Write adam_beta1, muon_momentum and so on."),
    "optim_target_modules": Refusal(_OFF, "groups of parameters are chosen by name", "Write parameter_groups."),
    "parallelism_config": Refusal(_OFF, "degrees are flat keys", _USE_DEGREES),
    "refined_recompute": Refusal(_OFF, "layers are chosen by their number", "Write recompute_interval: 2, for one."),
    "sequence_parallel_config": Refusal(
        _OFF, "arrives with tensor parallelism", "Write its flags in data_parallel_config now."
    ),
    "skip_data_intervals": Refusal(_OFF, "every sample is trained on", "Leave it out."),
    "use_expert_parallel": Refusal(_OFF, "experts are not divided among ranks", "Leave it out."),
}

_BY_COMMAND = "the command decides what is run"
_EVALUATION = "an evaluation is the loss and the perplexity of the validation data"
_HUB = "nothing is uploaded"
_CHECKPOINTS = "no checkpoint is written yet; the trained model is saved once, at the end"
_DATA = "samples are packed token sequences, prepared once and read from memory"
_DDP = "gradients are reduced by the step's own program"
_LOGS = "metrics.jsonl in output_dir has every step, from rank 0"
_KERNELS = "the model runs as Hugging Face defines it"
_LAUNCH = "the launcher decides it"
_MODES = "there is one mode, and the flags of all modes work in it"
_NAMES = "a run is known by its output_dir"
_BATCH = "the batch is as large as you write it"
_PRECISION = "parameters and activations have the one dtype"
_DETERMINISM = "weights and sample order depend on the seed alone"


def _because(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


MEANINGLESS = {
    **_because(_BY_COMMAND, "do_train do_eval do_predict do_export continue_training model_type autotuner_benchmark"),
    **_because(
        _EVALUATION,
        "batch_eval_metrics eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start "
        "eval_use_gather_object include_for_metrics include_inputs_for_metrics prediction_loss_only label_names "
        "metric_for_best_model greater_is_better max_evaluate_steps minimum_eval_times past_index",
    ),
    **_because(
        _HUB,
        "hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token push_to_hub "
        "push_to_hub_model_id push_to_hub_organization push_to_hub_token",
    ),
    **_because(
        _CHECKPOINTS,
        "enable_jit_checkpoint ignore_data_skip restore_callback_states_from_checkpoint save_on_each_node "
        "save_only_model save_safetensors save_sharded_model load_sharded_model use_async_save unified_checkpoint "
        "unified_checkpoint_config ckpt_quant_stage ordered_save_group_size ignore_load_lr_and_optim "
        "ignore_save_lr_and_optim force_reshard_pp auto_parallel_resume_form_hybrid_parallel "
        "save_sharding_stage1_model_include_freeze_params pdc_download_ckpt pdc_download_timeout output_signal_dir",
    ),
    **_because(
        _DATA,
        "data_seed dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers "
        "dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor length_column_name "
        "remove_unused_columns lazy_data_processing distributed_dataloader split data_impl share_folder "
        "dispatch_batches split_batches",
    ),
    **_because(
        _DDP,
        "ddp_backend ddp_broadcast_buffers ddp_find_unused_parameters ddp_static_graph flatten_param_grads "
        "fuse_sequence_parallel_allreduce sharding_parallel_mesh_dimension",
    ),
    **_because(
        _LOGS,
        "debug include_num_input_tokens_seen include_tokens_per_second log_level log_level_replica log_on_each_node "
        "logging_dir logging_first_step logging_nan_inf_filter logging_strategy metrics_output_path "
        "skip_memory_metrics skip_profile_timer wandb_api_key",
    ),
    **_because(
        _KERNELS,
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs recompute_use_reentrant liger_kernel_config "
        "use_liger_kernel torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps "
        "jit_mode_eval use_cache use_ipex use_flash_attention use_fused_rms_norm use_fused_rope fuse_attention_qkv "
        "fuse_attention_ffn tensor_parallel_output",
    ),
    **_because(
        _LAUNCH,
        "local_rank ray_scope mp_parameters tpu_num_cores tpu_metrics_debug use_mps_device xpu_backend",
    ),
    **_because(_MODES, "to_static enable_auto_parallel"),
    **_because(_NAMES, "run_name project trackio_bucket_id trackio_space_id trackio_static_space_id"),
    **_because(_BATCH, "auto_find_batch_size"),
    **_because(
        _PRECISION,
        "bf16_full_eval fp16_full_eval fp16_backend half_precision_backend amp_custom_black_list "
        "amp_custom_white_list tf32",
    ),
    **_because(_DETERMINISM, "full_determinism"),
    **_because("experts are not divided among ranks", "expert_max_capacity expert_min_capacity"),
}
"""Keys that mean nothing here, and why."""
