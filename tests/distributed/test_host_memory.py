import subprocess
import sys

import pytest

from syncline.distributed.host_memory import keep_freed_memory

PAGES = 2**20 // 4096
"""Of a mebibyte."""

COUNT_FAULTS = """
import resource, sys
from syncline.distributed.host_memory import keep_freed_memory

def faults_of_a_micro_batch() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    activations = [bytearray(2**20) for _ in range(64)]
    del activations
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = sys.argv[1] == "keep" and keep_freed_memory()
faults_of_a_micro_batch()
print(kept, faults_of_a_micro_batch())
"""


def count_faults(mode, **variables):
    """Whether memory is kept by what it says, and how often the second of two micro-batches waited for a page."""
    ran = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS, mode], env=variables, capture_output=True, text=True, check=True
    )
    kept, faults = ran.stdout.split()
    return kept == "True", int(faults)


@pytest.mark.skipif(sys.platform != "linux", reason="counts the page faults of glibc's heap")
def test_the_second_micro_batch_gets_no_page_from_the_system():
    assert count_faults("by default", MALLOC_TRIM_THRESHOLD_="65536")[1] >= 32 * PAGES
    kept, faults = count_faults("keep")
    assert kept
    assert faults < PAGES


@pytest.mark.skipif(sys.platform != "linux", reason="counts the page faults of glibc's heap")
def test_what_the_environment_says_stands():
    kept, faults = count_faults("keep", MALLOC_TRIM_THRESHOLD_="65536")
    assert not kept
    assert faults >= 32 * PAGES


@pytest.mark.parametrize("name", ["MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_other_ways_to_set_an_allocator_stand_too(name):
    assert not keep_freed_memory({name: "something"})
