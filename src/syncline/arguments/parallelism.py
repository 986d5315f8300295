"""The options that say how a job is divided among processes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from syncline.arguments.nearest import nearest
from syncline.arguments.option import option
from syncline.arguments.segmentation import UNIFORM, parse_segmentation
from syncline.errors import UserError

_option = partial(option, "Parallelism")

SHARDING_WORDS = ("stage1", "stage2", "stage3", "offload")


def parse_sharding(name: str, value: Any) -> tuple[str, ...]:
    """`stage1`, `stage2 offload` or a list of such words, as a tuple.

    Raises `UserError` for any other word, and for two stages.
    """
    if isinstance(value, bool):
        return ("stage1",) if value else ()
    words = [str(word) for word in value] if isinstance(value, (list, tuple)) else re.split(r"[\s,]+", str(value))
    for word in filter(None, words):
        if word not in SHARDING_WORDS:
            raise UserError(
                f"{name}={word}", "no such sharding stage", f"The nearest is {nearest(word, SHARDING_WORDS)}."
            )
    stages = sorted({word for word in words if word.startswith("stage")})
    if len(stages) > 1:
        raise UserError(
            f"{name}={' '.join(stages)}", "each stage includes the ones before it", f"Write {name}: {stages[-1]}."
        )
    return tuple(dict.fromkeys(filter(None, words)))


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ParallelismArguments:
    """How a job is divided among processes."""

    nproc_per_node: int | None = _option(
        None,
        "Processes on this machine: `syncline train` starts them itself.",
        effect="the number of ranks",
        cost="One process per device, or per share of the cores.",
        minimum=1,
        unset=-1,
        default_text="the product of the degrees",
    )
    world_size: int | None = _option(
        None,
        "Processes of the whole job, on all machines. Wins over nproc_per_node when a job is only planned.",
        effect="the number of ranks",
        cost="Free.",
        minimum=1,
        unset=-1,
        default_text="nproc_per_node",
    )
    data_parallel_degree: int | None = _option(
        None,
        "Replicas: groups of ranks that hold the same parameters and see different samples.",
        effect="with more than one, every bucket is reduced across them",
        cost="Throughput grows with it; each replica holds all gradients and optimizer state.",
        minimum=1,
        unset=-1,
        aliases=("data_parallel_size",),
        default_text="what the other degrees leave of the world",
    )
    pipeline_parallel_degree: int = _option(
        1,
        "Ranks of a pipeline, which hold consecutive layers.",
        effect="sends and receives of activations and gradients between stages, in the order of the schedule",
        cost="A rank holds a share of the layers; of the step, (ranks - 1) / (k + ranks - 1) is bubble under 1F1B.",
        minimum=1,
        unset=-1,
        aliases=("pipeline_parallel_size",),
    )
    virtual_pp_degree: int = _option(
        1,
        "Stages on each rank of a pipeline, any number up to what the layers suffice for. They are dealt out in turn, "
        "so that every micro-batch goes round the ranks so many times.",
        effect="an interleaved order of forwards and backwards",
        cost="1F1B's bubble divided by it, for any k that is not less than the ranks; as many times the messages, and "
        "up to twice the activations.",
        minimum=1,
        unset=-1,
    )
    pp_seg_method: tuple[str, ...] = _option(
        (UNIFORM,),
        "How layers are divided among stages: `uniform` by the cost of their matrices, the head's on the last stage "
        "included; `layer:PATTERN` by the number of those whose class the regular expression finds; or a number of "
        "layers for each stage, as `8,8,8,6`.",
        effect="which parameters are on which stage",
        cost="All ranks wait for the slowest stage.",
        parse=parse_segmentation,
    )
    pipeline_schedule_mode: str = _option(
        "1F1B",
        "The order of forwards and backwards in a pipeline: `1F1B` (`VPP` with virtual_pp_degree above 1, under either "
        "name), `FThenB`, or with halved backwards `ZBH1`, `ZBV`, `DualPipeV`, `Bounded`, `BoundedV`. Those with a V "
        "give each rank two stages, and the model runs down the ranks and up again. `best` is the one of them, with 1 "
        "to 4 stages a rank or virtual_pp_degree, that a simulation finds to be the shortest within "
        "pipeline_activation_limit.",
        effect="the order of all compute actions",
        cost="1F1B holds the activations of at most as many micro-batches as there are ranks from here on; FThenB of "
        "all k. ZBH1 lets every rank hold as much as the first one does, and ranks wait a third of 1F1B's time. See "
        "docs/schedules.md.",
        choices=("1F1B", "FThenB", "VPP", "ZBH1", "ZBV", "DualPipeV", "Bounded", "BoundedV", "best"),
    )
    pipeline_activation_limit: float | None = _option(
        None,
        "Under the schedules Bounded, BoundedV and best: of how many micro-batches a rank may hold the activations of "
        "all its layers, on its device or, under offload_activations, in host memory.",
        effect="how many forwards a rank may be ahead of its backwards",
        cost="Less than pipeline_parallel_degree saves memory and lets ranks wait longer. See docs/schedules.md.",
        minimum=1,
        unset=-1,
        default_text="pipeline_parallel_degree, which 1F1B needs",
    )
    tensor_parallel_degree: int = _option(
        1,
        "Ranks among which every layer is split. More than 1 arrives with tensor parallelism.",
        effect="collectives inside every forward and backward",
        cost="Memory of a layer divided by it, for two collectives per layer and direction.",
        minimum=1,
        unset=-1,
        aliases=("tensor_parallel_size",),
    )
    sequence_parallel: bool = _option(
        False,
        "Under tensor parallelism, activations between the split layers are divided along the sequence. "
        "Arrives with tensor parallelism.",
        effect="all-reduces become reduce-scatters and all-gathers",
        cost="Activation memory divided by tensor_parallel_degree at the same bytes.",
    )
    sep_parallel_degree: int = _option(
        1,
        "Ranks among which the sequence is split. More than 1 arrives with sequence and context parallelism.",
        effect="collectives inside every attention",
        cost="Activation memory divided by it.",
        minimum=1,
        unset=-1,
        aliases=("context_parallel_degree",),
    )
    sharding: tuple[str, ...] = _option(
        (),
        "Replicas divide optimizer state (`stage1`; by whole tensors, or with the flag split_param by flat slices), "
        "reduced gradients too (`stage2`), or parameters too (`stage3`).",
        effect="all-reduces become reductions to owners, who step and whose parameters are gathered",
        cost="What is divided takes 1/n of its memory. Stages 1 and 2 send what an all-reduce sends; stage 3 gathers "
        "the parameters anew for every forward and backward.",
        parse=parse_sharding,
    )
    sharding_parallel_degree: int | None = _option(
        None,
        "Ranks that divide what sharding divides; with fewer than there are replicas, the rest is data parallelism.",
        effect="the group of the reductions to owners; across the rest owners all-reduce what they own",
        cost="Memory against the reach of its collectives.",
        minimum=1,
        unset=-1,
        aliases=("sharding_degree",),
        default_text="all replicas, under sharding",
    )
    sharding_comm_buffer_size_MB: int | None = _option(
        None,
        "The largest bucket under sharding, in MiB of gradients.",
        effect="how many reduce-scatters and gathers there are",
        cost="As gradient_bucket_size_MB.",
        minimum=1,
        unset=-1,
        default_text="gradient_bucket_size_MB",
    )
    hybrid_parallel_topo_order: str = _option(
        "pp_first",
        "Which ranks are neighbours: `pp_first` puts the ranks of one stage next to each other, `sharding_first` the "
        "stages of one replica.",
        effect="which ranks form a group; the actions stay the same",
        cost="The axis whose ranks are neighbours communicates inside a machine.",
        choices=("pp_first", "sharding_first"),
    )
