import os

# Before torch loads, here and in every process that tests start: ranks share few cores, and sums keep their order.
os.environ["OMP_NUM_THREADS"] = "1"

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.pool import Pool

# The same examples in every run, however slow the machine is at the moment.
settings.register_profile("seeded", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("seeded")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--matrix",
        metavar="SHARE",
        default="",
        help="run every combination of the options of a gradient's life, not a sample; 3/100 is a hundredth of them",
    )


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The shared rank processes; see tests/pool.py."""
    processes = Pool()
    yield processes
    processes.close()
