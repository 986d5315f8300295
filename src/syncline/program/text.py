"""A program as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from syncline.program.actions import (
    Action,
    AllocateGradients,
    ClipGradients,
    OptimizerStep,
    PointToPoint,
    ReduceGradients,
    ReduceReplicated,
    ScaleGradients,
    ScaleLoss,
    snake_case,
)
from syncline.program.costs import summary
from syncline.program.program import Program


def line(action: Action) -> str:
    """One action as one line."""
    name = snake_case(type(action).__name__).replace("_", " ")
    if isinstance(action, PointToPoint):
        preposition = "to" if name.startswith("send") else "from"
        return f"{name} {action.micro_batch} {preposition} rank {action.peer}"
    if isinstance(action, ScaleLoss):
        return f"{name} {action.micro_batch} by {action.scale}"
    if isinstance(action, ScaleGradients):
        return f"{name} {action.bucket} by {action.scale}"
    if isinstance(action, ReduceGradients):
        return f"{name} {action.bucket} {action.op} over {action.group}{_during(action.during)}"
    if isinstance(action, ReduceReplicated):
        return f"{name} {action.bucket} sum over {action.group} ({action.what})"
    if isinstance(action, AllocateGradients):
        return f"{name} {action.bucket}{_during(action.during)}"
    if isinstance(action, ClipGradients):
        return (
            f"{name} of buckets {','.join(map(str, action.buckets)) or 'none'} over {action.group}{_by(action.scale)}"
        )
    if isinstance(action, OptimizerStep):
        return f"{name} {action.bucket}{_by(action.scale)}"
    if hasattr(action, "micro_batch"):
        return f"{name} {action.micro_batch}"
    if hasattr(action, "bucket"):
        return f"{name} {action.bucket}"
    return f"{name} over {action.group}{_by(getattr(action, 'scale', None))}"  # type: ignore[attr-defined]


def _by(scale: object) -> str:
    return f" by {scale}" if scale else ""


def _during(backward: Any) -> str:
    return f" during backward {backward.micro_batch}" if backward is not None else ""


def listing(program: Program, rank: int) -> list[str]:
    """One rank's actions, a line each."""
    return [line(action) for action in program.ranks[rank]]


def to_text(program: Program, ranks: Sequence[int] | None = None) -> str:
    """The whole program: degrees, buckets, each rank's actions, the summary.

    Ranks that hold the same stage do the same but for their peers; unless `ranks` names some, one of each stage is
    shown.
    """
    shown = list(ranks) if ranks is not None else [program.topology.rank(pp=s) for s in range(program.topology.pp)]
    degrees = ", ".join(f"{axis} {degree}" for axis, degree in program.topology.degrees.items() if degree > 1)
    parts = [
        f"{program.topology.world_size} ranks ({degrees or 'no parallelism'}), {program.micro_batches} micro-batches"
    ]
    parts += ["", *_bucket_table(program)]
    for rank in shown:
        alike = [other for other in range(program.topology.world_size) if program.stage(other) == program.stage(rank)]
        peers = f", as every rank of {alike}" if ranks is None and len(alike) > 1 else ""
        parts += ["", f"rank {rank}, stage {program.stage(rank)}{peers}"]
        parts += [f"  {text}" for text in listing(program, rank)]
    parts += ["", *_summary_lines(program)]
    return "\n".join(parts)


def _bucket_table(program: Program) -> list[str]:
    rows = ["bucket  stage  parameters  elements      bytes"]
    for bucket in program.layout.buckets:
        size = program.gradient_bytes(bucket.id)
        row = f"{bucket.id:>6}  {bucket.stage:>5}  {len(bucket.slots):>10}  {bucket.numel:>8}  {size:>9}"
        rows.append(row + (f"  tied: {bucket.tie}" if bucket.tie else ""))
    return rows


def _summary_lines(program: Program) -> list[str]:
    figures = summary(program)
    return [
        f"reductions per step            {figures['reductions_per_step']}"
        + f"  (each bucket: {_compact(list(figures['reductions_per_bucket'].values()))})",
        f"bytes sent per rank            {_compact(figures['bytes_sent_per_rank'])}",
        f"peak gradient bytes per rank   {_compact(figures['peak_gradient_bytes_per_rank'])}",
        f"gradient bytes between steps   {_compact(figures['gradient_bytes_between_steps_per_rank'])}",
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
                "decay": bucket.decay,
                "tied_stages": list(bucket.tie_stages),
            }
            for bucket in program.layout.buckets
        ],
        "ranks": [
            {"rank": rank, "stage": program.stage(rank), "actions": [action.to_json() for action in actions]}
            for rank, actions in enumerate(program.ranks)
        ],
        "summary": summary(program),
    }
