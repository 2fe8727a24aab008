"""Memory of long prompts on a CPU with few page faults.

glibc returns a block of more than 32 MiB to the system when it is freed, and maps the next one page
by page. Activations of long prompts are larger: mapping, zeroing and unmapping them took most of a
prefill above 16K tokens.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# malloc.h
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_MAX = -4
# Least growth of the heap in bytes: few system calls, and headroom for a layer's activations.
_STEP = 64 << 20
_HUGE = 2 << 20
_MADV_HUGEPAGE = 14


@cache
def keep_freed_memory() -> bool:
    """Make glibc's malloc keep freed memory in this process; True if that was set.

    malloc then uses no mmap and never trims, so the process keeps its peak memory. Nothing is
    changed with another C library, another malloc (jemalloc, tcmalloc), or settings of the user
    (any MALLOC_* or GLIBC_TUNABLES in the environment).
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc" in tunables or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    preloaded = os.environ.get("LD_PRELOAD", "")
    if any(name in preloaded for name in ("jemalloc", "tcmalloc", "mimalloc")):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version") or not hasattr(library, "mallopt"):
        return False
    options = ((_TRIM_THRESHOLD, -1), (_TOP_PAD, _STEP), (_MMAP_MAX, 0))
    return all(library.mallopt(name, value) == 1 for name, value in options)


def in_huge_pages(tensor: Tensor) -> Tensor:
    """Request pages of 2 MiB for a CPU tensor that has not been written to yet.

    A cache of 16,000 tokens has about 100,000 pages of 4 KiB, each a fault at its first write.
    """
    library = _library()
    if library is None or not tensor.is_cpu or tensor.nbytes < 2 * _HUGE:
        return tensor
    begin = -(-tensor.data_ptr() // _HUGE) * _HUGE
    length = (tensor.data_ptr() + tensor.nbytes) // _HUGE * _HUGE - begin
    # Advice only: without it pages are small.
    library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return tensor


@cache
def _library() -> ctypes.CDLL | None:
    """The C library where it has madvise."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "madvise") else None
