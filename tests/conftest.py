import os

# Before torch loads, here and in every process that tests start: ranks share few cores, and sums keep their order.
os.environ["OMP_NUM_THREADS"] = "1"

from collections.abc import Iterator

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The shared rank processes; see tests/pool.py."""
    processes = Pool()
    yield processes
    processes.close()
