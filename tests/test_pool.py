import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, RankFailure

pytestmark = pytest.mark.ranks


def summed(rank: int, world_size: int, offset: float) -> tuple[int, int, torch.Tensor]:
    tensor = torch.full((3,), rank + offset)
    dist.all_reduce(tensor)
    return dist.get_rank(), dist.get_world_size(), tensor


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def surroundings(rank: int, world_size: int) -> tuple[int, str | None, torch.dtype, float]:
    found = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS"), torch.get_default_dtype(), torch.rand(()).item()
    torch.set_default_dtype(torch.float64)
    return found


def failing_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise LookupError("lost the thread")
    dist.barrier()


def dying_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def hanging_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        threading.Event().wait()


def returning_what_cannot_travel(rank: int, world_size: int) -> object:
    return lambda: None


def test_a_group_of_exactly_the_ranks(pool: Pool):
    for ranks in (1, 3, 2):
        results = pool.run(ranks, summed, 0.5)
        assert [result[:2] for result in results] == [(rank, ranks) for rank in range(ranks)]
        for *_, tensor in results:
            assert torch.equal(tensor, torch.full((3,), sum(rank + 0.5 for rank in range(ranks))))


def test_processes_are_reused(pool: Pool):
    first = pool.run(2, process_id)
    assert first == pool.run(2, process_id)
    assert len({*first, os.getpid()}) == 3


def test_every_call_finds_the_same_surroundings(pool: Pool):
    first = pool.run(2, surroundings)
    assert first == pool.run(2, surroundings)
    assert first[0] == first[1]
    assert first[0][:3] == (1, "1", torch.float32)


def test_an_exception_is_raised_with_rank_and_traceback_and_harms_no_one(pool: Pool):
    before = pool.run(2, process_id)
    with pytest.raises(RankFailure, match=r"(?s)rank 1:.*in failing_on_one.*LookupError: lost the thread") as raised:
        pool.run(2, failing_on_one)
    assert raised.value.rank == 1
    assert pool.run(2, process_id) == before


def test_a_result_that_cannot_travel_is_a_failure(pool: Pool):
    with pytest.raises(RankFailure, match=r"pickle"):
        pool.run(1, returning_what_cannot_travel)


def test_a_dead_rank_is_named_and_replaced(pool: Pool):
    before = pool.run(2, process_id)
    with pytest.raises(RankFailure, match="rank 1: the process ended with status 7"):
        pool.run(2, dying_on_one)
    after = pool.run(2, process_id)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_a_hang_ends_at_the_deadline_and_shows_where(pool: Pool):
    before = pool.run(2, process_id)
    with pytest.raises(RankFailure, match=r"(?s)ranks \[1\] have not returned after 2 s.*hanging_on_one"):
        pool.run(2, hanging_on_one, timeout=2.0)
    after = pool.run(2, process_id)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_a_call_costs_little(pool: Pool):
    pool.run(4, process_id)
    start = time.perf_counter()
    for _ in range(10):
        pool.run(4, process_id)
    assert (time.perf_counter() - start) / 10 < 0.5  # about 0.02 s on an idle machine
