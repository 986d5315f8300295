"""The options that say which model is trained and in which precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from syncline.arguments.option import option

_option = partial(option, "Model")


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ModelArguments:
    """Which model, and in which precision."""

    model_name_or_path: str | None = _option(
        None,
        "A folder with a Hugging Face model, or a model's name on the hub: trains its weights. Excludes model_config.",
        effect="its parameters are the buckets; its layers are divided among the pipeline stages",
        cost="Starts from trained weights, at the price of reading them.",
        is_path=True,
    )
    model_config: Mapping[str, Any] | None = _option(
        None,
        "A Hugging Face configuration as a mapping with `model_type`: trains random weights of that shape. "
        "One entry is overridden with `--model_config.hidden_size 64`. Excludes model_name_or_path.",
        effect="its parameters are the buckets; its layers are divided among the pipeline stages",
        cost="Nothing is read or downloaded; the weights depend on the seed and not on the parallelism.",
    )
    tokenizer_name_or_path: str = _option(
        "",
        "A tokenizer's folder or hub name, `byte` (every byte is a token), or `train-bpe:N` (N tokens, trained on the "
        "training text).",
        cost="`byte` needs no file and makes sequences about four times longer; `train-bpe:N` takes seconds to train.",
        aliases=("tokenizer_name",),
        default_text="model_name_or_path, else byte",
        is_path=True,
    )
    dtype: str = _option(
        "float32",
        "The dtype of parameters and activations. Under bfloat16 and float16 (`bf16: true` and `fp16: true` are other "
        "spellings) the optimizer keeps float32 master weights; float16 scales losses up (scale_loss). float64 is for "
        "proofs.",
        effect="the size of what is sent between stages; the default dtype of main gradients and of the wire",
        cost="16 bits halve parameter and activation memory and are faster where the hardware has them: bfloat16 at 8 "
        "bits of mantissa, float16 at 11 with a range that overflows; float64 is several times slower.",
        choices=("float32", "bfloat16", "float64", "float16"),
        spellings={"bf16": "bfloat16", "fp32": "float32", "fp64": "float64", "fp16": "float16"},
        aliases=("torch_dtype",),
    )
    fp16_opt_level: str = _option(
        "O2",
        "How 16-bit training is done: O2 holds the parameters themselves in 16 bits beside float32 master weights. "
        "O1 (casting operation by operation) is refused.",
        cost="O2 halves parameter memory and casts nothing inside the step.",
        choices=("O2", "O1"),
    )
    amp_master_grad: bool | None = _option(
        None,
        "Gradients accumulate in float32 although parameters have 16 bits.",
        effect="the main gradients, hence every bucket, are float32",
        cost="Two more bytes per parameter; without it small gradients vanish when k micro-batches are summed.",
        default_text="true under bfloat16 and float16",
    )
    attn_implementation: str | None = _option(
        None,
        "The attention kernel, by its Hugging Face name: `eager`, `sdpa`, `flash_attention_2`, ...",
        cost="`eager` materialises the attention matrix; the others do not.",
        default_text="Hugging Face's choice",
    )
    freeze_parameters: tuple[str, ...] = _option(
        (),
        "Regular expressions, searched in parameter names: what they find is not trained.",
        effect="a frozen parameter is in no bucket: it is neither reduced nor updated",
        cost="Frozen parameters cost no gradient and no optimizer memory.",
    )
    recompute: bool = _option(
        False,
        "The activations inside each layer are dropped after the forward and computed again in the backward.",
        effect="the same actions; each backward takes one more forward of its layers",
        cost="About a third more compute for activations of one tensor per layer.",
        aliases=("gradient_checkpointing", "activation_checkpointing", "use_recompute"),
    )
    recompute_granularity: str = _option(
        "full",
        "What recompute drops: `full`, a whole layer, or `full_attn`, its attention.",
        effect="the same actions; each backward takes one more forward of so much",
        cost="`full` saves the most memory, `full_attn` costs the least compute.",
        choices=("full", "full_attn", "core_attn"),
    )
    recompute_interval: int = _option(
        1,
        "Every so-many-th layer is recomputed, counted from the first.",
        effect="the same actions; each backward takes one more forward of so many layers",
        cost="Activations of the other layers for their compute.",
        minimum=1,
        aliases=("pp_recompute_interval",),
    )
    offload_activations: bool | None = _option(
        None,
        "What a forward saves for its backward waits in host memory, and comes back as the backward needs it; under "
        "recompute that is what layers are computed again from. Parameters stay, and so does what a stage receives.",
        effect="an OffloadActivations inside every forward",
        cost="The device holds about one layer's activations, of one micro-batch at a time, and up to 256 MiB on their "
        "way in each direction. They cross the bus twice in every step, behind computations as far as these last. The "
        "host holds what the device would, in blocks that CUDA rounds up to powers of two.",
        aliases=("activation_offloading", "enable_activation_offloading"),
        default_text="false",
    )
