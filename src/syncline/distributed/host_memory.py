"""How this process treats memory of the host that is free again."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping

# Names and numbers of glibc's mallopt(3), and the environment variables by which a user sets the same.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_SET_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES", "LD_PRELOAD")

_LARGEST_MMAP_THRESHOLD = 32 * 2**20
"""Bytes; glibc refuses more on 64 bits."""
_NEVER = 2**31 - 1


def keep_freed_memory(variables: Mapping[str, str] = os.environ) -> bool:
    """Have the C library keep the memory of freed tensors for the next ones, as PyTorch's allocator does on a GPU.

    Each micro-batch frees its activations, and the next one needs as many. By its defaults glibc gives the end of the
    heap back to the system as often, and the system hands out the same pages again, one by one and filled with zeros:
    up to a twentieth of a step on a CPU. Blocks from 32 MiB on are still returned at once.

    Returns whether it was done: not where another C library serves memory, or where the environment (`variables`)
    already says how, for instance by `MALLOC_TRIM_THRESHOLD_`.
    """
    if platform.libc_ver()[0] != "glibc" or any(variables.get(name) for name in _SET_BY_USER):
        return False
    library = ctypes.CDLL(None)
    return bool(library.mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)) and bool(
        library.mallopt(_TRIM_THRESHOLD, _NEVER)
    )
