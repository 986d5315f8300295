"""Every flag of the four `*_parallel_config` options, in one table, and how such an option is read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

from syncline.arguments.nearest import nearest
from syncline.arguments.upcoming import Upcoming
from syncline.errors import UserError

DATA, PIPELINE = "data_parallel_config", "pipeline_parallel_config"
SHARDING, TENSOR = "sharding_parallel_config", "tensor_parallel_config"
CONFIGS = (DATA, PIPELINE, SHARDING, TENSOR)


class Need(Enum):
    """What must hold for a flag to have an effect; the value completes "it needs ..."."""

    NOTHING = "nothing"
    REPLICAS = "more than one data-parallel replica"
    STAGES = "pipeline_parallel_degree greater than 1"
    SHARDING = "sharding among more than one rank"
    STAGE1 = "sharding: stage1"
    BY_TENSORS = "sharding: stage1 without split_param"
    BY_SLICES = "sharding: stage1 with split_param"
    STAGE2 = "sharding: stage2"
    SLICES = "tensor_parallel_degree greater than 1"


class Status(Enum):
    """What becomes of a flag where its need is met."""

    EFFECTIVE = "effective"
    NO_EFFECT = "no effect, with a warning"
    ARRIVES = "arrives"
    REFUSED = "refused"


@dataclass(frozen=True)
class Flag:
    """One flag. At most one of `arrives`, `no_effect` and `refused` is given; none means it is effective."""

    name: str
    configs: tuple[str, ...]
    """The options in which it may stand."""
    meaning: str
    effect: str = "none yet"
    """On the step's program."""
    cost: str = "–"
    """What it costs and buys."""
    needs: Need = Need.NOTHING
    arrives: Upcoming | None = None
    no_effect: str = ""
    """Why it never changes anything in Syncline."""
    refused: tuple[str, str] | None = None
    """Why it has no meaning in Syncline, and what to write instead."""
    aliases: tuple[str, ...] = ()

    @property
    def status(self) -> Status:
        if self.arrives:
            return Status.ARRIVES
        if self.no_effect:
            return Status.NO_EFFECT
        return Status.REFUSED if self.refused else Status.EFFECTIVE

    @property
    def status_text(self) -> str:
        return str(self.arrives) if self.arrives else self.status.value


def parse_flags(name: str, value: Any) -> tuple[str, ...]:
    """The flags in the option `name`, by their main names, without repetition, in the given order.

    `value` is a string of flags separated by spaces or commas, or a list of flags. Raises `UserError` for an unknown
    flag and for a flag of another option.
    """
    words = re.split(r"[\s,]+", value) if isinstance(value, str) else value
    if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
        raise UserError(
            f"{name}={value}", "must be flags, separated by spaces or as a list", f"Write {name}: {FLAGS_OF[name][0]}."
        )
    return tuple(dict.fromkeys(_known(name, word).name for word in words if word))


def _known(name: str, word: str) -> Flag:
    flag = _BY_SPELLING.get(word)
    if flag is None:
        suggestion = nearest(word, _BY_SPELLING)
        place = _BY_SPELLING[suggestion].configs
        where = "" if name in place else f" (in {' or '.join(place)})"
        raise UserError(f"{name}={word}", "no such flag", f"The nearest is {suggestion}{where}.")
    if name not in flag.configs:
        raise UserError(
            f"{name}={word}", "a flag of another option", f"Write it in {' or '.join(flag.configs)} instead."
        )
    return flag


RELEASE_EFFECT = "AllocateGradients before a bucket's first gradient, FreeGradients after its OptimizerStep"
"""What releasing gradients does to the program, whether the flag or the option asks for it."""

_REPLICAS_EQUAL = (
    "replicated parameters get equal gradients on every rank, so they cannot drift apart",
    "Leave it out",
)

FLAGS = (
    # The life of a gradient: in effect in every topology.
    Flag(
        "gradient_sync_after_accumulate",
        (DATA,),
        "The same as gradient_sync: after_accumulation.",
        "the reductions move from the backwards to the head of the optimizer phase, one per bucket",
        "k times fewer bytes than reducing in every micro-batch, for full local gradients and nothing hidden behind "
        "the backward.",
        Need.REPLICAS,
    ),
    Flag(
        "enable_allreduce_avg_in_gradient_scale",
        (DATA,),
        "The collective averages.",
        "`sum` followed by a scale of 1/n becomes `avg`",
        "One multiplication less where the scale cannot be folded into the optimizer; averages round once more.",
        Need.REPLICAS,
        aliases=("enable_allreduce_avg_in_gradinent_scale",),
    ),
    Flag(
        "enable_dp_comm_overlap",
        (DATA, PIPELINE),
        "The same as overlap_gradient_reduction: true, which is the default except after accumulation.",
        "reductions start inside the backward as each bucket fills",
        "Communication hides behind the backward.",
        Need.REPLICAS,
        aliases=("dp_comm_overlap",),
    ),
    Flag(
        "enable_delay_scale_loss",
        CONFIGS,
        "The loss is not divided before the backward; the gradients are scaled after reduction.",
        "the loss's factor joins the gradients' one scale",
        "Free: factors on a gradient's path are folded into one. Larger intermediate gradients.",
        aliases=("delay_scale_loss",),
    ),
    Flag(
        "enable_release_grads",
        CONFIGS,
        "The same as release_grads: true.",
        RELEASE_EFFECT,
        "No gradient memory between steps, for an allocation per bucket and step.",
        aliases=("release_gradients",),
    ),
    Flag(
        "enable_timer",
        CONFIGS,
        "Each action of each rank is timed: `timeline-rank*.jsonl`, and when the run ends `trace.json`, which Perfetto "
        "and Chrome open, and a measured step in `report.html`.",
        "each action is timed; no device is synchronised for it",
        "Two timestamps per action.",
    ),
    Flag(
        "enable_profiling",
        CONFIGS,
        "The same as enable_timer.",
        "as enable_timer",
        "As enable_timer.",
        aliases=("profiling",),
    ),
    # Messages between pipeline stages.
    Flag(
        "disable_p2p_cache_shape",
        (PIPELINE,),
        "Every message is preceded by its shape, so that micro-batches may differ in length.",
        "none: the sends and receives carry a header",
        "A small message before each large one.",
        Need.STAGES,
        aliases=("enable_dynamic_shape",),
    ),
    Flag(
        "enable_clear_every_step_cache",
        (PIPELINE,),
        "Shapes are exchanged anew in every step, so that steps may differ in length.",
        "none: the first sends and receives of a step carry a header",
        "One small message per neighbour and step.",
        Need.STAGES,
        aliases=("clear_every_step_cache",),
    ),
    Flag(
        "disable_batch_p2p_comm",
        (PIPELINE,),
        "Sends and receives are posted one by one.",
        "none",
        needs=Need.STAGES,
        no_effect="point-to-point is never batched: each direction has a communicator of its own",
        aliases=("disable_non_batch_p2p_comm",),
    ),
    Flag(
        "use_batch_p2p_comm",
        (PIPELINE,),
        "Sends and receives of one moment are posted as one batch.",
        needs=Need.STAGES,
        refused=(
            "each direction has a communicator of its own, so there is nothing that batching would untangle",
            "Leave it out",
        ),
    ),
    Flag(
        "disable_partial_send_recv",
        (PIPELINE,),
        "Under tensor parallelism every slice sends the whole activation, not its part of it.",
        needs=Need.SLICES,
        arrives=Upcoming.TENSOR,
    ),
    Flag(
        "auto_parallel_sync_shared_params",
        (PIPELINE,),
        "The gradients of weights tied across stages are summed.",
        needs=Need.STAGES,
        no_effect="the gradients of tied weights are always summed",
    ),
    # Pipeline schedules.
    *(
        Flag(
            name,
            (PIPELINE,),
            meaning,
            "receives start before the computation in front of them",
            "Messages travel behind computations; room for one more in each direction.",
            Need.STAGES,
            aliases=aliases,
        )
        for name, meaning, aliases in (
            (
                "enable_overlap_p2p_comm",
                "What the next computation needs is being received while the one before it runs.",
                ("overlap_p2p_comm",),
            ),
            ("enable_send_recv_overlap", "The name of enable_overlap_p2p_comm in auto mode.", ()),
        )
    ),
    Flag(
        "best_unbalanced_scheduler",
        (PIPELINE,),
        "An interleaved order for k that the stages do not divide.",
        needs=Need.STAGES,
        no_effect="the interleaved schedule takes any number of micro-batches as it is",
    ),
    Flag(
        "enable_split_backward",
        (PIPELINE,),
        "Backwards are halved: `pipeline_schedule_mode: ZBH1`.",
        "backwards become a half for the input and a half for the weights, which fills waiting time",
        "As ZBH1.",
        Need.STAGES,
    ),
    Flag(
        "use_dualpipev",
        (PIPELINE,),
        "`pipeline_schedule_mode: DualPipeV`.",
        "the schedule",
        "As DualPipeV.",
        Need.STAGES,
    ),
    Flag(
        "forward_backward_overlap_scheduler",
        (PIPELINE,),
        "A forward and a backward run side by side.",
        needs=Need.STAGES,
        refused=(
            "a rank computes one thing at a time; what overlaps with it is communication, and that always",
            "Write pipeline_schedule_mode: DualPipeV, which puts a forward beside each backward",
        ),
    ),
    Flag(
        "enable_offload_queue",
        (PIPELINE,),
        "`offload_activations: true`.",
        "as offload_activations",
        "As offload_activations.",
    ),
    # Sharding.
    Flag(
        "split_param",
        (SHARDING,),
        "Stage 1 divides updates by flat slices, not by whole tensors.",
        "reductions are reduce-scatters to slices, gathers are all-gathers; every rank steps on its slice of each "
        "bucket",
        "Perfect balance; half the bytes of an all-reduce before the step and half behind it. Optimizers that look at "
        "whole tensors (adafactor, muon) need it off.",
        Need.STAGE1,
    ),
    *(
        Flag(
            name,
            configs,
            f"The same as overlap_gradient_reduction: true{where}.",
            "as enable_dp_comm_overlap",
            "As enable_dp_comm_overlap.",
            needs,
            aliases=aliases,
        )
        for name, configs, where, needs, aliases in (
            (
                "enable_sharding_comm_overlap",
                (PIPELINE, SHARDING),
                ", under any sharding",
                Need.SHARDING,
                ("sharding_comm_overlap",),
            ),
            ("enable_stage1_overlap", (SHARDING,), ", in stage 1", Need.STAGE1, ("comm_overlap", "enable_overlap")),
            ("enable_stage2_overlap", (SHARDING,), ", in stage 2", Need.STAGE2, ()),
        )
    ),
    *(
        Flag(
            name,
            (SHARDING,),
            f"The same as overlap_parameter_gather: true, in stage 1 by {what}, and the default.",
            "the WaitGathers move from the end of the step to each bucket's first use in the next forward",
            "The gathers hide behind the next forward.",
            needs,
        )
        for name, what, needs in (
            ("enable_stage1_broadcast_overlap", "tensors", Need.BY_TENSORS),
            ("enable_stage1_allgather_overlap", "slices", Need.BY_SLICES),
        )
    ),
    Flag(
        "free_grads_in_comm",
        (SHARDING,),
        "A bucket of gradients is freed once it is reduced; the rank keeps the shard that it owns.",
        "AccumulateShard and FreeGradients behind each reduction, AllocateGradients before the next gradient",
        "Between reduction and step a rank holds 1/n of the gradients; stages 2 and 3 always do it.",
        Need.STAGE1,
    ),
    Flag(
        "use_reduce_avg",
        (SHARDING,),
        "The same as enable_allreduce_avg_in_gradient_scale.",
        "`sum` followed by a scale of 1/n becomes `avg`",
        "As enable_allreduce_avg_in_gradient_scale.",
        Need.SHARDING,
    ),
    *(
        Flag(name, (SHARDING,), meaning, "none", needs=needs, no_effect=why, aliases=aliases)
        for name, meaning, needs, why, aliases in (
            (
                "disable_stage1_reduce_avg",
                "Stage 1 reduces by sum and scales.",
                Need.STAGE1,
                "sums are the default, and their scale is folded away",
                (),
            ),
            (
                "enable_stage1_tensor_fusion",
                "Stage 1 communicates whole buckets.",
                Need.STAGE1,
                "whole buckets are always communicated",
                ("tensor_fusion", "enable_tensor_fusion"),
            ),
            (
                "fuse_optimizer",
                "One optimizer call for many parameters.",
                Need.SHARDING,
                "a bucket is always updated by one fused call",
                (),
            ),
            (
                "enable_fuse_optimizer_states",
                "Optimizer state lives in fused buffers.",
                Need.SHARDING,
                "optimizer state always lies in one buffer per bucket",
                (),
            ),
        )
    ),
    Flag(
        "enable_stage1_tensor_fusion_blanced_save_load",
        (SHARDING,),
        "Checkpoints of fused optimizer state are balanced between ranks.",
        needs=Need.SHARDING,
        arrives=Upcoming.CHECKPOINTS,
    ),
    # Tensor parallelism.
    *(
        Flag(name, (TENSOR,), meaning, needs=Need.SLICES, arrives=Upcoming.TENSOR)
        for name, meaning in (
            ("enable_mp_async_allreduce", "The input gradient's all-reduce overlaps the weight gradient."),
            ("enable_mp_skip_c_identity", "Copies around split layers are skipped."),
            ("enable_mp_fused_linear_param_grad_add", "Weight gradients add straight into the main gradient."),
            ("enable_sp_async_reduce_scatter", "The reduce-scatter of sequence parallelism overlaps."),
            ("replace_with_c_embedding", "The embedding is split by rows."),
            ("replace_with_parallel_cross_entropy", "The loss is computed on split logits."),
        )
    ),
    *(
        Flag(name, (TENSOR,), meaning, needs=Need.SLICES, refused=_REPLICAS_EQUAL)
        for name, meaning in (
            ("sync_param", "Replicated parameters are broadcast in every step."),
            ("sync_grad", "Replicated parameters' gradients are broadcast in every step."),
            ("sync_moment", "Replicated parameters' moments are broadcast in every step."),
        )
    ),
)
"""Every flag. Those of one subject stand together."""

FLAGS_OF = {config: tuple(flag.name for flag in FLAGS if config in flag.configs) for config in CONFIGS}

_BY_SPELLING = {spelling: flag for flag in FLAGS for spelling in (flag.name, *flag.aliases)}
