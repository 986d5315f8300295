"""The options of a gradient's life: when it is reduced, how it is averaged, in which dtype, and when it is freed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from syncline.arguments.flags import RELEASE_EFFECT, parse_flags
from syncline.arguments.option import option

_option = partial(option, "The life of a gradient")


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class GradientArguments:
    """A gradient's life."""

    gradient_sync: str | None = _option(
        None,
        "When gradients are reduced across replicas: `last_micro_batch`, `every_micro_batch` or `after_accumulation` "
        "(the flag gradient_sync_after_accumulate).",
        effect="the reductions stand in the last backward, in every backward, or between the last backward and the "
        "optimizer steps",
        cost="every_micro_batch sends k times the bytes; after_accumulation hides nothing behind the backward and is "
        "the simplest to reason about; last_micro_batch sends once and hides it.",
        choices=("last_micro_batch", "every_micro_batch", "after_accumulation"),
        default_text="last_micro_batch",
    )
    overlap_gradient_reduction: bool | None = _option(
        None,
        "Each bucket's reduction starts inside the backward as soon as its last gradient is there. "
        "The flag enable_dp_comm_overlap is another spelling of `true`.",
        effect="`during` of a ReduceGradients names the backward that triggers it; off, it stands behind that backward",
        cost="Communication hides behind the backward, and competes with it for cores or multiprocessors.",
        default_text="true, except after accumulation",
    )
    overlap_parameter_gather: bool | None = _option(
        None,
        "Under sharding, updated parameters travel behind the next forward, each bucket waited for at its first use. "
        "The flags enable_stage1_broadcast_overlap and enable_stage1_allgather_overlap are other spellings of `true`. "
        "Stage 3 gathers parameters around their use anyway.",
        effect="`during` of a WaitGather names the next step's first forward; off, it stands behind the optimizer "
        "steps",
        cost="Communication hides behind the forward, and competes with it for cores or multiprocessors.",
        default_text="true",
    )
    release_grads: bool | None = _option(
        None,
        "Gradient storage is freed as soon as the optimizer has consumed it. The flag enable_release_grads is another "
        "spelling of `true`.",
        effect=RELEASE_EFFECT,
        cost="No gradient memory is held between steps; storage is allocated anew in every step.",
        default_text="false",
    )
    gradient_normalization: str = _option(
        "tokens",
        "What the sum of token losses is divided by: `tokens`, the valid tokens of the global batch, as one process "
        "would; or `micro_batch_mean`, the mean of the micro-batches' own means, for parity with other tools.",
        effect="the factor of every ScaleLoss and of the reported loss",
        cost="micro_batch_mean weighs a token in a short micro-batch more than one in a full micro-batch.",
        choices=("tokens", "micro_batch_mean"),
    )
    gradient_reduce_dtype: str | None = _option(
        None,
        "The dtype of gradients on the wire.",
        effect="the bytes of every reduction",
        cost="bfloat16 halves the bytes and rounds every gradient before the sum.",
        choices=("float32", "bfloat16", "float64"),
        spellings={"bf16": "bfloat16", "fp32": "float32", "fp64": "float64"},
        default_text="the main gradients' dtype",
    )
    scale_loss: float = _option(
        32768.0,
        "Under float16: by what losses are scaled up at first. The scale halves when a gradient overflows, which skips "
        "the step, and doubles after 2000 steps without an overflow.",
        effect="a factor of every ScaleLoss, undone in the optimizer steps; CheckFinite behind ClipGradients",
        cost="Too small loses small gradients; too large costs a few skipped steps at the start.",
        above=0,
    )
    gradient_bucket_size_MB: float = _option(
        25.0,
        "The largest bucket, in MiB of gradients. A single larger parameter gets a bucket of its own.",
        effect="how many buckets, hence reductions and optimizer steps, there are",
        cost="Small buckets start earlier and free sooner; large ones cost fewer launches.",
        above=0,
        aliases=("ddp_bucket_cap_mb",),
    )
    data_parallel_config: tuple[str, ...] = _option(
        (),
        "Flags, separated by spaces or commas or as a list; they act in every topology.",
        effect="see the flags",
        cost="See the flags.",
        parse=parse_flags,
    )
    pipeline_parallel_config: tuple[str, ...] = _option(
        (),
        "Flags of pipeline parallelism.",
        effect="see the flags",
        cost="See the flags.",
        parse=parse_flags,
    )
    sharding_parallel_config: tuple[str, ...] = _option(
        (),
        "Flags of sharding.",
        effect="see the flags",
        cost="See the flags.",
        parse=parse_flags,
    )
    tensor_parallel_config: tuple[str, ...] = _option(
        (),
        "Flags of tensor parallelism.",
        effect="see the flags",
        cost="See the flags.",
        parse=parse_flags,
    )
