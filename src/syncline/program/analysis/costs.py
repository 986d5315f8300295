"""What a program costs, by formula and by liveness: bytes on the wire, bytes of gradients, bubbles.

The runtime counts with the same `wire_bytes` what it really sends, so that a forecast and a count can only differ when
the program and the run do.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate
from typing import Any

from syncline.program.actions import (
    COMPUTATIONS,
    Action,
    AllocateGradients,
    ClipGradients,
    Computation,
    CountTokens,
    FreeGradients,
    FreeParameters,
    GatherParameters,
    ReduceGradients,
    ReduceLoss,
    ReduceReplicated,
    SendActivation,
    SendGradient,
)
from syncline.program.analysis.simulation import Moment, length, most_activations, simulate_pipeline
from syncline.program.program import Program
from syncline.strategy import Ownership

SCALAR_BYTES = 8
"""Token counts, norms and losses travel as one 8-byte number each."""


def wire_bytes(kind: str, members: int, payload: int, *, owner: bool = True) -> int:
    """Bytes that one member sends for one collective on `payload` bytes, rounded up.

    All-reduces are counted by the bandwidth-optimal (ring) algorithm. In a `reduce` to its owner every other member
    sends its payload, and in a `broadcast` the owner sends it to every other member: as many owners as members make
    these as balanced as the `reduce_scatter` and the `all_gather` of slices.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
    """
    if members == 1:
        return 0
    if kind == "reduce":
        return 0 if owner else payload
    if kind == "broadcast":
        return (members - 1) * payload if owner else 0
    rounds = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}[kind]
    return -(-rounds * (members - 1) * payload // members)


def sent_bytes(program: Program, rank: int, action: Action) -> int:
    """Bytes that `rank` sends for `action`."""
    if isinstance(action, (SendActivation, SendGradient)):
        return program.sizes.activation_bytes
    if isinstance(action, ReduceGradients):
        # What was reduced to its owners is reduced further in the owned part only.
        start, stop = program.owned(rank, action.bucket)
        divided = action.kind == "all_reduce" and program.layout.ownership is not Ownership.REPLICATED
        numel = stop - start if divided else program.bucket(action.bucket).numel
        return _collective_bytes(program, rank, action, numel * program.sizes.reduce_itemsize)
    if isinstance(action, GatherParameters):
        return _collective_bytes(program, rank, action, program.parameter_bytes(action.bucket))
    if isinstance(action, ReduceReplicated):
        start, stop = program.owned(rank, action.bucket)
        payload = (stop - start) * program.sizes.gradient_itemsize
        return wire_bytes("all_reduce", len(program.members(rank, action.group)), payload)
    if isinstance(action, (CountTokens, ClipGradients, ReduceLoss)):
        return wire_bytes("all_reduce", len(program.members(rank, action.group)), SCALAR_BYTES)
    return 0


def _collective_bytes(program: Program, rank: int, action: ReduceGradients | GatherParameters, payload: int) -> int:
    members = len(program.members(rank, action.group))
    return wire_bytes(action.kind, members, payload, owner=program.owns(rank, action.bucket))


def bytes_sent(program: Program, rank: int) -> int:
    return sum(sent_bytes(program, rank, action) for action in program.ranks[rank])


def bytes_sent_by_group(program: Program, rank: int) -> dict[str, int]:
    """Bytes that `rank` sends in each group, `pp` for what stages send each other."""
    sent: Counter[str] = Counter()
    for action in program.ranks[rank]:
        # What stages send each other has no group.
        sent[group_name(getattr(action, "group", "pp"))] += sent_bytes(program, rank, action)
    return {group: count for group, count in sent.items() if count}


def group_name(group: str) -> str:
    """Under which name the traffic of a group is told: copies of tied weights belong to the pipeline."""
    return "pp" if group.startswith("tied:") else group


def peak_gradient_bytes(program: Program, rank: int) -> int:
    """The largest sum of gradient storage alive at any moment of the step, shards included."""
    changes = (gradient_bytes_added(program, rank, action) for action in program.ranks[rank])
    return max(accumulate(changes, initial=gradient_bytes_between_steps(program, rank)))


def gradient_bytes_added(program: Program, rank: int, action: Action) -> int:
    """By how many bytes the gradient storage of `rank` grows with `action`; negative where it shrinks."""
    if not isinstance(action, (AllocateGradients, FreeGradients)):
        return 0
    size = program.storage_bytes(rank, action.bucket, action.part)
    return size if isinstance(action, AllocateGradients) else -size


def peak_gathered_bytes(program: Program, rank: int) -> int:
    """The largest sum of gathered parameters alive at any moment, where parameters are freed within the step."""
    freed = {action.bucket for action in program.ranks[rank] if isinstance(action, FreeParameters)}
    peak = held = 0
    for action in program.ranks[rank]:
        if isinstance(action, GatherParameters) and action.bucket in freed:
            held += program.parameter_bytes(action.bucket)
            peak = max(peak, held)
        elif isinstance(action, FreeParameters):
            held -= program.parameter_bytes(action.bucket)
    return peak


def peak_activations(program: Program, rank: int) -> int:
    """The most micro-batches whose activations are alive at any moment, each at one of the rank's stages."""
    return most_activations(program.ranks[rank])


def with_peaks(program: Program) -> Program:
    """The program with its peaks of gradient bytes and of gathered parameters written into it."""
    ranks = range(program.topology.world_size)
    return replace(
        program,
        peak_gradient_bytes=tuple(peak_gradient_bytes(program, rank) for rank in ranks),
        peak_gathered_bytes=tuple(peak_gathered_bytes(program, rank) for rank in ranks),
    )


def reductions(program: Program) -> Counter[int]:
    """How many reductions of each bucket one step takes, on the rank that takes part in most of them."""
    counts: Counter[int] = Counter()
    for actions in program.ranks:
        counts |= Counter(action.bucket for action in actions if isinstance(action, ReduceGradients))
    return counts


def bubble_fraction(program: Program) -> float:
    """The share of the step in which ranks wait for one another, as `simulated` has it."""
    moments = simulated(program)
    busy = sum(moment.end - moment.begin for own in moments for moment in own)
    step = length(moments)
    return 1.0 - busy / (step * len(moments)) if step else 0.0


def simulated_time(program: Program) -> float:
    """How long a pipeline computes and waits in one step, in forwards through one stage, as `simulated` has it."""
    return length(simulated(program))


def simulated(program: Program) -> tuple[tuple[Moment, ...], ...]:
    """When the ranks of a pipeline compute in one step, in forwards through one stage; messages take no time."""
    pipeline = program.topology.group(0, ("pp",))
    return simulate_pipeline({rank: program.ranks[rank] for rank in pipeline})


def computations(program: Program, rank: int) -> list[Computation]:
    return [action for action in program.ranks[rank] if isinstance(action, COMPUTATIONS)]


def summary(program: Program) -> dict[str, Any]:
    """The `summary` object of `syncline program --json`."""
    counts = reductions(program)
    return {
        "reductions_per_step": sum(counts.values()),
        "reductions_per_bucket": {bucket.id: counts[bucket.id] for bucket in program.layout.buckets},
        "bytes_sent_per_rank": [bytes_sent(program, rank) for rank in range(program.topology.world_size)],
        "bytes_sent_by_group_per_rank": [
            bytes_sent_by_group(program, rank) for rank in range(program.topology.world_size)
        ],
        "peak_gradient_bytes_per_rank": list(program.peak_gradient_bytes),
        "peak_gathered_bytes_per_rank": list(program.peak_gathered_bytes),
        "gradient_bytes_between_steps_per_rank": [
            gradient_bytes_between_steps(program, rank) for rank in range(program.topology.world_size)
        ],
        "peak_activations_per_rank": [peak_activations(program, rank) for rank in range(program.topology.world_size)],
        "bubble_fraction": round(bubble_fraction(program), 6),
    }


def gradient_bytes_between_steps(program: Program, rank: int) -> int:
    """Bytes of the buckets and shards that keep their storage from step to step."""
    return sum(program.storage_bytes(rank, bucket, part) for bucket, part in program.kept_storages(rank))
