"""A program as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from enum import Enum
from typing import Any

from syncline.program.actions import (
    Action,
    Bubble,
    ClipGradients,
    GatherParameters,
    OptimizerStep,
    Part,
    PointToPoint,
    ReduceGradients,
    ReduceReplicated,
    ScaleGradients,
    ScaleLoss,
    snake_case,
)
from syncline.program.analysis.costs import summary
from syncline.program.program import Program
from syncline.program.scales import ONE, Factor
from syncline.strategy import Ownership


def line(action: Action, *, tells_stage: bool = False) -> str:
    """One action as one line. With `tells_stage` it says which of a rank's stages it is about."""
    name = snake_case(type(action).__name__).replace("_", " ")
    stage = f" of stage {action.stage}" if tells_stage and hasattr(action, "stage") else ""
    during = getattr(action, "during", None)
    inside = f" during {line(during, tells_stage=tells_stage)}" if during is not None else ""
    if isinstance(action, PointToPoint):
        preposition = "to" if name.startswith("send") else "from"
        return f"{name} {action.micro_batch}{stage} {preposition} rank {action.peer}"
    if isinstance(action, ScaleLoss):
        return f"{name} {action.micro_batch} by {action.scale}"
    if isinstance(action, ScaleGradients):
        return f"{name} {action.bucket} by {action.scale}"
    if isinstance(action, ReduceGradients):
        how = "" if action.kind == "all_reduce" else f" by {action.kind.replace('_', '-')}"
        return f"{name} {action.bucket} {action.op} over {action.group}{how}{inside}"
    if isinstance(action, GatherParameters):
        return f"{name} {action.bucket} over {action.group} by {action.kind.replace('_', '-')}{inside}"
    if isinstance(action, ReduceReplicated):
        return f"{name} {action.bucket} sum over {action.group} ({action.what})"
    if isinstance(action, ClipGradients):
        return (
            f"{name} of buckets {','.join(map(str, action.buckets)) or 'none'} over {action.group}{_by(action.scale)}"
        )
    if isinstance(action, Bubble):
        return f"{name} {action.index} for {action.capacity:g} forwards"
    if isinstance(action, OptimizerStep):
        return f"{name} {action.bucket}{_by(action.scale)}"
    if hasattr(action, "micro_batch"):
        return f"{name} {action.micro_batch}{stage}{inside}"
    if hasattr(action, "bucket"):
        part = " shard" if getattr(action, "part", Part.BUCKET) is Part.SHARD else ""
        return f"{name} {action.bucket}{part}{inside}"
    if not hasattr(action, "group"):
        return name
    return f"{name} over {action.group}{_by(getattr(action, 'scale', None))}"


def _by(scale: object) -> str:
    return f" by {scale}" if scale else ""


def listing(program: Program, rank: int) -> list[str]:
    """One rank's actions, a line each."""
    several = len(program.stages(rank)) > 1
    return [line(action, tells_stage=several) for action in program.ranks[rank]]


def title(program: Program, rank: int) -> str:
    """The rank and its stages."""
    stages = program.stages(rank)
    return f"rank {rank}, stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def to_text(program: Program, ranks: Sequence[int] | None = None) -> str:
    """The whole program: degrees, buckets, each rank's actions, the summary.

    Ranks that hold the same stages, and own the same of them where whole buckets have owners, do the same but for their
    peers; unless `ranks` names some, one of each kind is shown.
    """
    kinds = kinds_of_ranks(program)
    shown = list(ranks) if ranks is not None else [alike[0] for alike in kinds]
    degrees = ", ".join(f"{axis} {degree}" for axis, degree in program.topology.degrees.items() if degree > 1)
    parts = [
        f"{program.topology.world_size} ranks ({degrees or 'no parallelism'}), {program.micro_batches} micro-batches"
    ]
    parts += ["", *bucket_table(program)]
    for rank in shown:
        alike = next(alike for alike in kinds if rank in alike)
        peers = f", as every rank of {alike}" if ranks is None and len(alike) > 1 else ""
        parts += ["", f"{title(program, rank)}{peers}"]
        parts += [f"  {text}" for text in listing(program, rank)]
    parts += ["", *summary_lines(program)]
    return "\n".join(parts)


def kinds_of_ranks(program: Program) -> list[list[int]]:
    """The ranks, those together that do the same but for their peers."""
    by_tensors = program.layout.ownership is Ownership.TENSORS
    kinds: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for rank in range(program.topology.world_size):
        shard = program.topology.coordinate(rank)["sharding"] if by_tensors else 0
        kinds.setdefault((program.stages(rank), shard), []).append(rank)
    return list(kinds.values())


def bucket_table(program: Program) -> list[str]:
    """The buckets, a line each below the headings."""
    rows = ["bucket  stage  parameters  elements      bytes"]
    for bucket in program.layout.buckets:
        size = program.gradient_bytes(bucket.id)
        row = f"{bucket.id:>6}  {bucket.stage:>5}  {len(bucket.slots):>10}  {bucket.numel:>8}  {size:>9}"
        row += f"  tied: {bucket.tie}" if bucket.tie else ""
        row += f"  owner: {bucket.owner}" if bucket.owner is not None else ""
        rows.append(row + ("  frozen" if bucket.frozen else ""))
    return rows


def summary_lines(program: Program) -> list[str]:
    """The figures of a program, a line each."""
    figures = summary(program)
    return [
        f"reductions per step            {figures['reductions_per_step']}"
        + f"  (each bucket: {_compact(list(figures['reductions_per_bucket'].values()))})",
        f"bytes sent per rank            {_compact(figures['bytes_sent_per_rank'])}",
        f"peak gradient bytes per rank   {_compact(figures['peak_gradient_bytes_per_rank'])}",
        *(
            [f"peak gathered bytes per rank   {_compact(figures['peak_gathered_bytes_per_rank'])}"]
            if any(figures["peak_gathered_bytes_per_rank"])
            else []
        ),
        f"gradient bytes between steps   {_compact(figures['gradient_bytes_between_steps_per_rank'])}",
        f"activations of micro-batches   {_compact(figures['peak_activations_per_rank'])}",
        f"bubble fraction                {figures['bubble_fraction']:.3f}",
    ]


def _compact(values: Sequence[int]) -> str:
    return f"{values[0]:,}" if len(set(values)) == 1 else " ".join(f"{value:,}" for value in values)


def to_json(program: Program) -> dict[str, Any]:
    """The document of `syncline program --json`."""
    return {
        "world_size": program.topology.world_size,
        "degrees": program.topology.degrees,
        "micro_batches": program.micro_batches,
        "target_scale": str(program.target),
        "buckets": [
            {
                "id": bucket.id,
                "stage": bucket.stage,
                "numel": bucket.numel,
                "bytes": program.gradient_bytes(bucket.id),
                "parameters": [slot.name for slot in bucket.slots],
                "owner": bucket.owner,
                "frozen": bucket.frozen,
                "tied_stages": list(bucket.tie_stages),
            }
            for bucket in program.layout.buckets
        ],
        "ranks": [
            {"rank": rank, "stages": list(program.stages(rank)), "actions": [action_json(action) for action in actions]}
            for rank, actions in enumerate(program.ranks)
        ],
        "summary": summary(program),
    }


def action_json(action: Action) -> dict[str, Any]:
    """One action as a JSON object: `action` is the snake_case class name; fields that say nothing (None, the factor 1)
    are left out.
    """
    document: dict[str, Any] = {"action": snake_case(type(action).__name__)}
    for field in fields(action):
        value = getattr(action, field.name)
        if value is None or value == ONE or value == "" or value is Part.BUCKET:
            continue
        if isinstance(value, Enum):
            value = value.value
        elif isinstance(value, Action):
            value = action_json(value)
        elif isinstance(value, Factor):
            value = str(value)
        elif isinstance(value, tuple):
            value = list(value)
        document[field.name] = value
    return document
