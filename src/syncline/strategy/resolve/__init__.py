"""What the arguments amount to: immutable, validated decisions.

Here, in the table of what arrives later (`unsupported`) and in the table of flags (`arguments.flags`) stands what
options refuse in each other's company. A value that is wrong by itself, and keys that say two things at once, are
refused where arguments are read (`arguments`); what only the model, the data, the machine or the run's folder can show
is refused where it is found. Every warning that options alone decide is here, in the table of options without effect
(`ineffective`), in the table of flags, or among the arguments' own notices of keys that mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from syncline.arguments import TrainingArguments
from syncline.arguments.flags import CONFIGS, Need
from syncline.errors import UserError
from syncline.schedules import BEST, HALVED, V_SHAPED
from syncline.strategy import Normalization, Ownership, ShapeExchange, Sharding, Strategy, SyncMoment
from syncline.strategy.resolve.flags import acting_flags, is_met
from syncline.strategy.resolve.ineffective import ineffective_warnings
from syncline.strategy.resolve.unsupported import refuse_unsupported
from syncline.strategy.topology import Topology

OVERLAP_FLAGS = (
    "enable_dp_comm_overlap",
    "enable_sharding_comm_overlap",
    "enable_stage1_overlap",
    "enable_stage2_overlap",
)
"""Spellings of `overlap_gradient_reduction: true`."""

AVERAGE_FLAGS = ("enable_allreduce_avg_in_gradient_scale", "use_reduce_avg")
"""Spellings of an average in the collective."""


RECEIVE_AHEAD_FLAGS = ("enable_overlap_p2p_comm", "enable_send_recv_overlap")

WHOLE_TENSOR_OPTIMIZERS = ("adafactor", "muon")
"""These cannot update a slice of a parameter."""


def resolve_strategy(arguments: TrainingArguments) -> Strategy:
    """The decisions that `arguments` amount to, with a warning for everything that has no effect.

    Raises `UserError` for combinations that have no meaning and for what arrives later.
    """
    refuse_unsupported(arguments)
    topology = _topology(arguments)
    _refuse_slices_of_whole_tensors(arguments, topology)
    _refuse_core_attention(arguments)
    flags, flag_warnings = acting_flags(arguments, topology)
    _refuse_sums_and_averages(arguments, topology)
    schedule = _schedule(arguments, topology, flags)
    parameter_dtype, gradient_dtype, reduce_dtype = _dtypes(arguments)
    sync = _sync_moment(arguments)
    offloads = bool(_switched_on(arguments, flags, "offload_activations", "enable_offload_queue"))
    return Strategy(
        topology=topology,
        micro_batches=arguments.gradient_accumulation_steps,
        schedule=schedule,
        virtual_stages=_virtual_stages(arguments, topology, schedule),
        activation_limit=arguments.pipeline_activation_limit,
        sync=sync,
        overlap=_overlap(arguments, flags, sync),
        average_in_collective=bool(flags & set(AVERAGE_FLAGS)),
        release_gradients=bool(_switched_on(arguments, flags, "release_grads", "enable_release_grads")),
        sharding=_sharding(arguments),
        free_in_communication="free_grads_in_comm" in flags,
        overlap_gathers=_overlap_gathers(arguments, flags),
        delay_loss_scale="enable_delay_scale_loss" in flags,
        normalization=Normalization(arguments.gradient_normalization),
        parameter_dtype=parameter_dtype,
        gradient_dtype=gradient_dtype,
        reduce_dtype=reduce_dtype,
        scales_loss=parameter_dtype == "float16",
        bucket_bytes=_bucket_bytes(arguments),
        shape_exchange=_shape_exchange(flags),
        receive_ahead=bool(flags & set(RECEIVE_AHEAD_FLAGS)),
        offload_activations=offloads,
        timers=bool(flags & {"enable_timer", "enable_profiling"}),
        warnings=(
            *arguments.notices,
            *ineffective_warnings(arguments, topology),
            *flag_warnings,
            *_warnings(arguments, topology, flags, sync),
            *_schedule_warnings(arguments, flags, schedule),
            *held_between_halves_warnings(arguments, schedule, offloads=offloads),
        ),
    )


def _topology(arguments: TrainingArguments) -> Topology:
    """The degrees; the data-parallel degree is what the others leave of the world when it is not given."""
    pp, tp, sep = arguments.pipeline_parallel_degree, arguments.tensor_parallel_degree, arguments.sep_parallel_degree
    world = arguments.world_size or arguments.nproc_per_node
    sharding = arguments.sharding_parallel_degree or 1
    if arguments.sharding and arguments.sharding_parallel_degree is None and world:
        # All replicas divide among themselves what sharding divides.
        sharding = max(1, world // (pp * tp * sep * (arguments.data_parallel_degree or 1)))
    others = pp * tp * sep * sharding
    dp = arguments.data_parallel_degree or (_data_parallel_degree(arguments, world, others) if world else 1)
    if world and dp * others != world:
        raise UserError(
            f"{_world(arguments)} and {_degrees(arguments)}",
            f"the degrees multiply to {dp * others}, not to {world}",
            f"Write {_world_key(arguments)}: {dp * others}, or leave data_parallel_degree out.",
        )
    return Topology(pp=pp, dp=dp, sharding=sharding, sep=sep, tp=tp, order=arguments.hybrid_parallel_topo_order)


def _data_parallel_degree(arguments: TrainingArguments, world: int, others: int) -> int:
    if world % others:
        below, above = world // others * others, (world // others + 1) * others
        fitting = f"{below} or {above}" if below else f"{above}"
        raise UserError(
            f"{_world(arguments)} and {_degrees(arguments)}",
            f"{world} ranks cannot be divided into groups of {others}",
            f"Write {_world_key(arguments)}: {fitting}, or degrees whose product divides {world}.",
        )
    return world // others


def _world_key(arguments: TrainingArguments) -> str:
    return "world_size" if arguments.world_size else "nproc_per_node"


def _world(arguments: TrainingArguments) -> str:
    return f"{_world_key(arguments)}={getattr(arguments, _world_key(arguments))}"


def _degrees(arguments: TrainingArguments) -> str:
    """The degrees that were given, as they would be written."""
    names = (
        "data_parallel_degree",
        "sharding_parallel_degree",
        "pipeline_parallel_degree",
        "tensor_parallel_degree",
        "sep_parallel_degree",
    )
    given = [f"{name}={getattr(arguments, name)}" for name in names if (getattr(arguments, name) or 1) > 1]
    return ", ".join(given) or "data_parallel_degree=1"


def _schedule(arguments: TrainingArguments, topology: Topology, flags: frozenset[str]) -> str:
    """The schedule asked for, by its key or by a flag that means one."""
    asked = arguments.pipeline_schedule_mode
    if topology.pp == 1:
        return "1F1B"
    if "use_dualpipev" in flags and asked not in ("1F1B", "DualPipeV"):
        raise UserError(
            f"pipeline_parallel_config=use_dualpipev and pipeline_schedule_mode={asked}",
            "the flag means pipeline_schedule_mode: DualPipeV",
            "Keep one of the two.",
        )
    if "use_dualpipev" in flags:
        asked = "DualPipeV"
    if "enable_split_backward" not in flags or asked in (*HALVED, BEST):
        return asked
    if asked == "FThenB":
        raise UserError(
            "pipeline_parallel_config=enable_split_backward and pipeline_schedule_mode=FThenB",
            "halved backwards fill the time in which ranks wait, and FThenB holds all activations for nothing",
            "Write pipeline_schedule_mode: ZBH1.",
        )
    return "ZBH1"


def _virtual_stages(arguments: TrainingArguments, topology: Topology, schedule: str) -> int:
    """The stages on each rank of a pipeline: as many as asked for, or two where they go down the ranks and up again."""
    asked = arguments.virtual_pp_degree
    if topology.pp == 1:
        return 1
    if arguments.pipeline_schedule_mode == "VPP" and asked == 1:
        raise UserError(
            "pipeline_schedule_mode=VPP and virtual_pp_degree=1",
            "a rank with one stage has nothing to interleave",
            "Write virtual_pp_degree: 2 or more, or pipeline_schedule_mode: 1F1B.",
        )
    if schedule not in V_SHAPED:
        return asked
    if asked > 2:
        by_flag = arguments.pipeline_schedule_mode != schedule
        given = "pipeline_parallel_config=use_dualpipev" if by_flag else f"pipeline_schedule_mode={schedule}"
        raise UserError(
            f"{given} and virtual_pp_degree={asked}",
            "the model runs down the ranks once and up again, so each of them has two stages",
            "Leave virtual_pp_degree out, or write pipeline_schedule_mode: ZBH1, which takes any number.",
        )
    return 2


def _dtypes(arguments: TrainingArguments) -> tuple[str, str, str]:
    """The dtypes of parameters, of main gradients, and of gradients on the wire."""
    parameters = arguments.dtype
    in_16_bits = parameters in ("bfloat16", "float16")
    if in_16_bits and arguments.fp16_opt_level == "O1":
        raise UserError(
            "fp16_opt_level=O1",
            f"parameters are held in {parameters} themselves; nothing is cast operation by operation",
            "Write fp16_opt_level: O2, or dtype: float32.",
        )
    gradients = "float32" if in_16_bits and arguments.amp_master_grad is not False else parameters
    wire = arguments.gradient_reduce_dtype or gradients
    if wire == "float64" and gradients != "float64":
        raise UserError(
            f"gradient_reduce_dtype=float64 and dtype={parameters}",
            f"gradients of {gradients} gain nothing on a float64 wire",
            "Leave gradient_reduce_dtype out, or write dtype: float64.",
        )
    return parameters, gradients, wire


def _sync_moment(arguments: TrainingArguments) -> SyncMoment:
    """When gradients are reduced, from the key and the flag; they must not contradict each other."""
    asked = SyncMoment(arguments.gradient_sync) if arguments.gradient_sync else None
    flag = "gradient_sync_after_accumulate"
    if flag not in arguments.data_parallel_config:
        return asked or SyncMoment.LAST_MICRO_BATCH
    if asked not in (None, SyncMoment.AFTER_ACCUMULATION):
        raise UserError(
            f"gradient_sync={arguments.gradient_sync} and data_parallel_config={flag}",
            "the flag means gradient_sync: after_accumulation",
            "Keep one of the two.",
        )
    return SyncMoment.AFTER_ACCUMULATION


def _overlap(arguments: TrainingArguments, flags: frozenset[str], sync: SyncMoment) -> bool:
    """Whether reductions start inside the backward: by default wherever there is a backward left to overlap."""
    spellings = [_switched_on(arguments, flags, "overlap_gradient_reduction", flag) for flag in OVERLAP_FLAGS]
    asked = next((spelling for spelling in spellings if spelling), "")
    if sync is not SyncMoment.AFTER_ACCUMULATION:
        return arguments.overlap_gradient_reduction is not False
    if asked:
        moment = "gradient_sync=after_accumulation" if arguments.gradient_sync else "gradient_sync_after_accumulate"
        raise UserError(
            f"{asked} and {moment}",
            "when reductions start after the last backward, no backward is left to overlap with",
            "Leave one of the two out; gradient_sync: last_micro_batch reduces as seldom and overlaps.",
        )
    return False


def _sharding(arguments: TrainingArguments) -> Sharding:
    if "stage3" in arguments.sharding:
        return Sharding.STAGE3
    if "stage2" in arguments.sharding:
        return Sharding.STAGE2
    if "stage1" not in arguments.sharding:
        return Sharding.NONE
    slices = "split_param" in arguments.sharding_parallel_config
    return Sharding.STAGE1_SLICE if slices else Sharding.STAGE1_TENSOR


def _refuse_slices_of_whole_tensors(arguments: TrainingArguments, topology: Topology) -> None:
    divides_slices = topology.sharding > 1 and _sharding(arguments).ownership is Ownership.SLICES
    if not divides_slices or arguments.optim not in WHOLE_TENSOR_OPTIMIZERS:
        return
    stage = " ".join(arguments.sharding)
    flag = " with split_param" if "stage1" in arguments.sharding else ""
    raise UserError(
        f"optim={arguments.optim} and sharding={stage}{flag}",
        f"{arguments.optim} looks at each parameter as a whole, and flat slices cut through parameters",
        "Write sharding: stage1 without split_param, which divides by whole tensors, or optim: adamw.",
    )


def _refuse_core_attention(arguments: TrainingArguments) -> None:
    if arguments.recompute and arguments.recompute_granularity == "core_attn":
        raise UserError(
            "recompute_granularity=core_attn",
            "only eager attention keeps scores that could be dropped; every other kernel computes them again anyway",
            "Write attn_implementation: sdpa and leave recompute off, or recompute_granularity: full_attn.",
        )


def _refuse_sums_and_averages(arguments: TrainingArguments, topology: Topology) -> None:
    sums = "disable_stage1_reduce_avg"
    if sums not in arguments.sharding_parallel_config or not is_met(Need.STAGE1, arguments, topology):
        return
    for flag in AVERAGE_FLAGS:
        if config := _config_of(arguments, flag):
            raise UserError(
                f"sharding_parallel_config={sums} and {config}={flag}",
                "one asks for sums, the other for averages in the same collectives",
                "Keep one of the two.",
            )


def _overlap_gathers(arguments: TrainingArguments, flags: frozenset[str]) -> bool:
    for flag in ("enable_stage1_broadcast_overlap", "enable_stage1_allgather_overlap"):
        _switched_on(arguments, flags, "overlap_parameter_gather", flag)
    return arguments.overlap_parameter_gather is not False


def _bucket_bytes(arguments: TrainingArguments) -> int:
    of_sharding = arguments.sharding_comm_buffer_size_MB if arguments.sharding else None
    return max(1, int((of_sharding or arguments.gradient_bucket_size_MB) * 2**20))


def _switched_on(arguments: TrainingArguments, flags: frozenset[str], key: str, flag: str) -> str:
    """How `key` was switched on, as written: by itself or by `flag`, if that acts; empty when it was not."""
    config = _config_of(arguments, flag) if flag in flags else None
    if config and getattr(arguments, key) is False:
        raise UserError(f"{key}=false and {config}={flag}", f"the flag means {key}: true", "Keep one of the two.")
    if config:
        return f"{config}={flag}"
    return f"{key}=true" if getattr(arguments, key) else ""


def _config_of(arguments: TrainingArguments, flag: str) -> str | None:
    """In which option the flag stands."""
    return next((config for config in CONFIGS if flag in getattr(arguments, config)), None)


def _shape_exchange(flags: frozenset[str]) -> ShapeExchange:
    if "disable_p2p_cache_shape" in flags:
        return ShapeExchange.EVERY_MESSAGE
    return ShapeExchange.EACH_STEP if "enable_clear_every_step_cache" in flags else ShapeExchange.ONCE


def _warnings(
    arguments: TrainingArguments, topology: Topology, flags: frozenset[str], sync: SyncMoment
) -> Iterator[str]:
    """What only the decisions together show to have no effect."""
    if topology.replicas > 1 and sync is SyncMoment.AFTER_ACCUMULATION and arguments.gradient_accumulation_steps == 1:
        yield (
            "Reducing after accumulation saves no reduction here: gradient_accumulation_steps is 1. "
            "It only ends the overlap of reductions with the backward."
        )
    stages = (Sharding.STAGE2, Sharding.STAGE3)
    keeps_shards = topology.sharding > 1 and (_sharding(arguments) in stages or "free_grads_in_comm" in flags)
    by_default = not arguments.gradient_sync and sync is SyncMoment.LAST_MICRO_BATCH
    if keeps_shards and by_default and arguments.gradient_accumulation_steps > 1:
        yield (
            "Whole gradients accumulate until the last micro-batch here, and only then become shards. Write "
            "gradient_sync: every_micro_batch to hold shards only, for k times the bytes, or gradient_sync: "
            "last_micro_batch to keep it so."
        )
    if {"disable_p2p_cache_shape", "enable_clear_every_step_cache"} <= flags:
        yield "enable_clear_every_step_cache has no effect here: disable_p2p_cache_shape sends every shape anyway."


def _schedule_warnings(arguments: TrainingArguments, flags: frozenset[str], schedule: str) -> Iterator[str]:
    """What has no effect, or less than one would think, under the schedule."""
    made_it_halve = schedule == "ZBH1" != arguments.pipeline_schedule_mode
    if "enable_split_backward" in flags and not made_it_halve:
        why = "the best schedule is found among halved and whole backwards" if schedule == BEST else ""
        yield f"enable_split_backward has no effect here: {why or f'{schedule} halves backwards anyway'}."
    for flag in sorted(flags & set(RECEIVE_AHEAD_FLAGS)):
        if "disable_p2p_cache_shape" in flags:
            yield f"{flag} has no effect here: disable_p2p_cache_shape lets nothing come before its shape is known."


def held_between_halves_warnings(arguments: TrainingArguments, schedule: str, *, offloads: bool) -> Iterator[str]:
    """Whose savings between the halves of backwards are small."""
    for option in ("recompute",) * arguments.recompute + ("offload_activations",) * offloads:
        if schedule in HALVED:
            yield (
                f"{option} saves less under {schedule}: between the halves of a backward the inputs of all linear "
                "layers are held on the device. pipeline_schedule_mode: 1F1B holds none of them."
            )
