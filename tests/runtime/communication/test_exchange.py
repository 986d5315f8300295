"""Reductions to owners and gathers from owners bring what they should, to the bit, on real ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from syncline.runtime.communication.errors import CommunicationError
from syncline.runtime.communication.exchange import (
    Peers,
    Pending,
    start_all_gather,
    start_broadcast,
    start_reduce,
    start_reduce_scatter,
)
from tests.pool import RankFailure

pytestmark = pytest.mark.ranks

WIDTH = 192
"""Elements of one slice."""

DTYPES = [
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
]
"""(of the bucket, on the wire)"""


def whole_world(rank: int, world_size: int) -> Peers:
    assert dist.group.WORLD is not None
    return Peers(dist.group.WORLD, tuple(range(world_size)), rank)


def values(rank: int, world_size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What `rank` puts in, shape (WIDTH * world_size,); everybody knows everybody's."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(WIDTH * world_size, generator=generator, dtype=torch.float64).to(dtype)


def summed(own: int, world_size: int, op: str, dtype: torch.dtype, wire: torch.dtype, seed: int = 0) -> Tensor:
    """What the rank at place `own` must get: its own values, then the others' in their order."""
    total = values(own, world_size, dtype, seed)
    for other in range(world_size):
        if other != own:
            total += values(other, world_size, dtype, seed).to(wire)
    return total / world_size if op == "avg" else total


def slice_of(flat: Tensor, place: int) -> Tensor:
    return flat[place * WIDTH : (place + 1) * WIDTH]


# ---- One at a time ---------------------------------------------------------------------------------------------------


def reduce_scatter(rank: int, world_size: int) -> None:
    for (dtype, wire), op in product(DTYPES, ("sum", "avg")):
        for seed in range(2):
            flat = values(rank, world_size, dtype, seed)
            start_reduce_scatter(flat, whole_world(rank, world_size), op, wire, 0, "").wait()
            expected = slice_of(summed(rank, world_size, op, dtype, wire, seed), rank)
            assert torch.equal(slice_of(flat, rank), expected), (op, dtype, wire)


def reduce_to_owners(rank: int, world_size: int) -> None:
    for (dtype, wire), op, owner in product(DTYPES, ("sum", "avg"), range(world_size)):
        flat = values(rank, world_size, dtype)
        start_reduce(flat, whole_world(rank, world_size), owner, op, wire, 0, "").wait()
        if rank == owner:
            assert torch.equal(flat, summed(owner, world_size, op, dtype, wire)), (op, dtype, wire)


def all_gather(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        flat = torch.full((WIDTH * world_size,), torch.nan, dtype=dtype)
        slice_of(flat, rank).copy_(slice_of(values(rank, world_size, dtype), rank))
        start_all_gather(flat, whole_world(rank, world_size), 0, "").wait()
        for place in range(world_size):
            assert torch.equal(slice_of(flat, place), slice_of(values(place, world_size, dtype), place))


def broadcast(rank: int, world_size: int) -> None:
    for dtype, owner in product((torch.float32, torch.float64, torch.bfloat16), range(world_size)):
        flat = values(rank, world_size, dtype)
        start_broadcast(flat, whole_world(rank, world_size), owner, 0, "").wait()
        assert torch.equal(flat, values(owner, world_size, dtype))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("exchange", [reduce_scatter, reduce_to_owners, all_gather, broadcast])
def test_everybody_gets_what_it_owns_or_what_others_own(pool, exchange, ranks):
    pool.run(ranks, exchange)


def alone(rank: int, world_size: int) -> None:
    for op in ("sum", "avg"):
        flat = values(0, 1, torch.float32)
        peers = whole_world(rank, world_size)
        start_reduce_scatter(flat, peers, op, torch.float32, 0, "").wait()
        start_reduce(flat, peers, 0, op, torch.float32, 0, "").wait()
        start_all_gather(flat, peers, 0, "").wait()
        start_broadcast(flat, peers, 0, 0, "").wait()
        assert torch.equal(flat, values(0, 1, torch.float32))


def test_one_rank_exchanges_nothing(pool):
    pool.run(1, alone)


# ---- Several at a time -----------------------------------------------------------------------------------------------


def many_in_flight(rank: int, world_size: int) -> None:
    """Buckets of different sizes and both directions, waited for in an order of each rank's own."""
    peers = whole_world(rank, world_size)
    gathers_of = Peers(dist.new_group(list(range(world_size))), peers.ranks, rank)
    for round in range(3):
        scattered = [values(rank, world_size, torch.float32, seed) for seed in range(4)]
        owned = [values(rank, world_size, torch.float32, seed)[: 64 * (seed + 1)] for seed in range(4)]
        gathered = [values(rank, world_size, torch.float32, seed) for seed in range(4)]
        started: list[Pending] = []
        for bucket in range(4):
            started.append(start_reduce_scatter(scattered[bucket], peers, "sum", torch.float32, bucket, ""))
            started.append(start_all_gather(gathered[bucket], gathers_of, bucket, ""))
            owner = bucket % world_size
            started.append(start_reduce(owned[bucket], peers, owner, "sum", torch.float32, 4 + bucket, ""))
        generator = torch.Generator().manual_seed(10 * round + rank)
        for index in torch.randperm(len(started), generator=generator).tolist():
            started[index].wait()
        for seed in range(4):
            expected = summed(rank, world_size, "sum", torch.float32, torch.float32, seed)
            assert torch.equal(slice_of(scattered[seed], rank), slice_of(expected, rank))
            if rank == seed % world_size:
                assert torch.equal(owned[seed], expected[: 64 * (seed + 1)])
            for place in range(world_size):
                from_there = slice_of(values(place, world_size, torch.float32, seed), place)
                assert torch.equal(slice_of(gathered[seed], place), from_there)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_several_may_be_under_way_and_be_waited_for_in_any_order(pool, ranks):
    pool.run(ranks, many_in_flight)


def same_bucket_again(rank: int, world_size: int) -> None:
    """Under one tag, one after the other, as micro-batches do."""
    peers = whole_world(rank, world_size)
    for seed in range(5):
        flat = values(rank, world_size, torch.float32, seed)
        pending = start_reduce_scatter(flat, peers, "sum", torch.float32, 3, "")
        pending.wait()
        expected = summed(rank, world_size, "sum", torch.float32, torch.float32, seed)
        assert torch.equal(slice_of(flat, rank), slice_of(expected, rank))


def test_a_bucket_is_reduced_again_and_again(pool):
    pool.run(3, same_bucket_again)


def waited_twice(rank: int, world_size: int) -> None:
    flat = values(rank, world_size, torch.float32)
    pending = start_reduce_scatter(flat, whole_world(rank, world_size), "sum", torch.float32, 0, "")
    pending.wait()
    once = flat.clone()
    pending.wait()
    assert torch.equal(flat, once)


def test_a_second_wait_adds_nothing(pool):
    pool.run(2, waited_twice)


def some_groups(rank: int, world_size: int) -> None:
    """Of four ranks, two and two that are not neighbours."""
    for members in ((0, 2), (1, 3)):
        group = dist.new_group(list(members))
        if rank not in members:
            continue
        own = members.index(rank)
        flat = values(own, 2, torch.float32)
        start_reduce_scatter(flat, Peers(group, members, own), "sum", torch.float32, 0, "").wait()
        expected = summed(own, 2, "sum", torch.float32, torch.float32)
        assert torch.equal(slice_of(flat, own), slice_of(expected, own))
        start_all_gather(flat, Peers(group, members, own), 0, "").wait()
        for place in range(2):
            there = summed(place, 2, "sum", torch.float32, torch.float32)
            assert torch.equal(slice_of(flat, place), slice_of(there, place))


def test_slices_follow_the_places_in_the_group_and_not_the_global_ranks(pool):
    pool.run(4, some_groups)


def test_nobody_begins_with_the_same_peer():
    places = [[Peers(None, (4, 5, 6, 7), own).others[step] for own in range(4)] for step in range(3)]  # type: ignore[arg-type]
    assert all(sorted(step) == [0, 1, 2, 3] for step in places)


# ---- What does not come ----------------------------------------------------------------------------------------------

WHAT = "the reduction of bucket 3 over sharding"
STARTS: dict[str, Callable[[Tensor, Peers], Pending]] = {
    "reduce-scatter": lambda flat, peers: start_reduce_scatter(flat, peers, "sum", torch.float32, 0, WHAT),
    "reduce": lambda flat, peers: start_reduce(flat, peers, 0, "sum", torch.float32, 0, WHAT),
    "all-gather": lambda flat, peers: start_all_gather(flat, peers, 0, WHAT),
    "broadcast": lambda flat, peers: start_broadcast(flat, peers, 1, 0, WHAT),
}


def wait_in_vain(rank: int, world_size: int) -> list[str]:
    """Rank 1 is alive and takes no part."""
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=2)) for _ in STARTS]

    def message(start: Callable[[Tensor, Peers], Pending], group: dist.ProcessGroup) -> str:
        with pytest.raises(CommunicationError) as error:
            start(values(0, 2, torch.float32), Peers(group, (0, 1), 0)).wait()
        return str(error.value)

    with ThreadPoolExecutor() as threads:
        messages = list(threads.map(message, STARTS.values(), groups)) if rank == 0 else []
    dist.barrier()
    return messages


def test_what_others_do_not_join_is_named(pool):
    messages, _ = pool.run(2, wait_in_vain)
    assert len(messages) == len(STARTS)
    for message in messages:
        assert message.startswith(f"rank 0 waited for {WHAT}, which did not come: ")


def lose_a_peer(rank: int, world_size: int, written: Path) -> None:
    """Rank 1 dies while rank 0 waits for its part."""
    flat = values(rank, world_size, torch.float32)
    dist.barrier()
    if rank == 1:
        os._exit(3)
    try:
        start_reduce_scatter(flat, whole_world(rank, world_size), "sum", torch.float32, 0, WHAT).wait()
    except CommunicationError as error:
        written.write_text(str(error))


def test_the_death_of_a_peer_is_told_by_what_was_waited_for(pool, tmp_path):
    with pytest.raises(RankFailure, match="rank 1: the process ended with status 3"):
        pool.run(2, lose_a_peer, tmp_path / "message")
    assert (tmp_path / "message").read_text().startswith(f"rank 0 waited for {WHAT}, which did not come: ")
