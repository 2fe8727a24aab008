"""Has the C library keep the memory that activations free: above 16K tokens most of a prefill was page faults.

glibc gives pieces of more than 32 MiB back to the system when they are freed, and fetches the next ones page by page:
an activation of a long prompt is larger, so that each one was mapped, zeroed and unmapped anew.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

# malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
# What the heap grows by at least, in bytes: few calls of the system, and room for a layer's activations.
_STEP = 64 << 20


@cache
def keep_freed_memory() -> bool:
    """Set glibc's malloc, once for this process, to take no piece from mmap and to give none back; whether it did.

    The process then holds the most that it ever needed. Another C library, another malloc in its place (jemalloc,
    tcmalloc) and settings of the user's own (any MALLOC_* or GLIBC_TUNABLES in the environment) are left alone.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    if any(name in os.environ.get("LD_PRELOAD", "") for name in ("jemalloc", "tcmalloc", "mimalloc")):
        return False
    library = ctypes.CDLL(None)
    if not (hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt")):
        return False
    return all(
        library.mallopt(name, value) == 1 for name, value in ((_TRIM_THRESHOLD, -1), (_TOP_PAD, _STEP), (_MMAP_MAX, 0))
    )
