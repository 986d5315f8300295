"""What a program costs, by formula and by liveness: bytes on the wire, bytes of gradients, bubbles.

The runtime counts with the same `wire_bytes` what it really sends, so that a forecast and a count can only differ when
the program and the run do.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from syncline.program.actions import (
    Action,
    AllocateGradients,
    Backward,
    ClipGradients,
    CountTokens,
    Forward,
    FreeGradients,
    ReceiveActivation,
    ReceiveGradient,
    ReduceGradients,
    ReduceLoss,
    ReduceReplicated,
    SendActivation,
    SendGradient,
)
from syncline.program.program import Program

SCALAR_BYTES = 8
"""Token counts, norms and losses travel as one 8-byte number each."""

BACKWARD_COST = 2.0
"""A backward's time in forwards: two matrix products for each of the forward's."""


def wire_bytes(kind: str, members: int, payload: int) -> int:
    """Bytes that each member sends for one collective on `payload` bytes, by the bandwidth-optimal (ring) algorithm.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009). Rounded
    up.
    """
    if members == 1:
        return 0
    rounds = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}[kind]
    return -(-rounds * (members - 1) * payload // members)


def sent_bytes(program: Program, rank: int, action: Action) -> int:
    """Bytes that `rank` sends for `action`."""
    if isinstance(action, (SendActivation, SendGradient)):
        return program.sizes.activation_bytes
    if isinstance(action, ReduceGradients):
        payload = program.bucket(action.bucket).numel * program.sizes.reduce_itemsize
        return wire_bytes(action.kind, len(program.members(rank, action.group)), payload)
    if isinstance(action, ReduceReplicated):
        return wire_bytes("all_reduce", len(program.members(rank, action.group)), program.gradient_bytes(action.bucket))
    if isinstance(action, (CountTokens, ClipGradients, ReduceLoss)):
        return wire_bytes("all_reduce", len(program.members(rank, action.group)), SCALAR_BYTES)
    return 0


def bytes_sent(program: Program, rank: int) -> int:
    return sum(sent_bytes(program, rank, action) for action in program.ranks[rank])


def peak_gradient_bytes(program: Program, rank: int) -> int:
    """The largest sum of gradient storage alive at any moment of the step."""
    peak = held = gradient_bytes_between_steps(program, rank)
    for action in program.ranks[rank]:
        if isinstance(action, AllocateGradients):
            held += program.gradient_bytes(action.bucket)
            peak = max(peak, held)
        elif isinstance(action, FreeGradients):
            held -= program.gradient_bytes(action.bucket)
    return peak


def with_peaks(program: Program) -> Program:
    """The program with its peak of gradient bytes written into it."""
    peaks = tuple(peak_gradient_bytes(program, rank) for rank in range(program.topology.world_size))
    return replace(program, peak_gradient_bytes=peaks)


def reductions(program: Program) -> Counter[int]:
    """How often each bucket is reduced in one step; a collective is counted once, however many ranks take part."""
    counts: Counter[int] = Counter()
    for rank, actions in enumerate(program.ranks):
        for action in actions:
            if isinstance(action, ReduceGradients) and program.members(rank, action.group)[0] == rank:
                counts[action.bucket] += 1
    return counts


def bubble_fraction(program: Program) -> float:
    """The share of the step in which a stage waits for another, with unit forwards, `BACKWARD_COST` backwards and free
    messages.
    """
    pipeline = program.topology.group(0, ("pp",))
    finish: dict[tuple[str, int, int], float] = {}
    clocks = dict.fromkeys(pipeline, 0.0)
    positions = dict.fromkeys(pipeline, 0)
    busy = 0.0
    moved = True
    while moved:
        moved = False
        for rank in pipeline:
            actions = program.ranks[rank]
            while positions[rank] < len(actions):
                arrival = _arrival(actions[positions[rank]], finish)
                if arrival is None:
                    break
                action = actions[positions[rank]]
                duration = {Forward: 1.0, Backward: BACKWARD_COST}.get(type(action), 0.0)
                clocks[rank] = max(clocks[rank], arrival) + duration
                busy += duration
                if isinstance(action, (Forward, Backward)):
                    finish[type(action).__name__, action.stage, action.micro_batch] = clocks[rank]
                positions[rank] += 1
                moved = True
    length = max(clocks.values())
    return 1.0 - busy / (length * len(pipeline)) if length else 0.0


def _arrival(action: Action, finish: dict[tuple[str, int, int], float]) -> float | None:
    """When what a receive waits for is there; None while unknown, 0 for everything that waits for nobody."""
    if isinstance(action, ReceiveActivation):
        return finish.get(("Forward", action.stage - 1, action.micro_batch))
    if isinstance(action, ReceiveGradient):
        return finish.get(("Backward", action.stage + 1, action.micro_batch))
    return 0.0


def summary(program: Program) -> dict[str, Any]:
    """The `summary` object of `syncline program --json`."""
    counts = reductions(program)
    return {
        "reductions_per_step": sum(counts.values()),
        "reductions_per_bucket": {bucket.id: counts[bucket.id] for bucket in program.layout.buckets},
        "bytes_sent_per_rank": [bytes_sent(program, rank) for rank in range(program.topology.world_size)],
        "peak_gradient_bytes_per_rank": list(program.peak_gradient_bytes),
        "gradient_bytes_between_steps_per_rank": [
            gradient_bytes_between_steps(program, rank) for rank in range(program.topology.world_size)
        ],
        "bubble_fraction": round(bubble_fraction(program), 6),
    }


def gradient_bytes_between_steps(program: Program, rank: int) -> int:
    """Bytes of the buckets that keep their storage from step to step."""
    released = program.released_buckets(rank)
    return sum(program.gradient_bytes(bucket.id) for bucket in program.buckets(rank) if bucket.id not in released)
