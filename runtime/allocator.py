"""Memory of long prompts on a CPU with few page faults.

glibc gives blocks of more than 32 MiB back to the system when they are freed, and fetches the next
ones page by page. An activation of a long prompt is larger: each one was mapped, zeroed and
unmapped anew, which above 16K tokens was most of a prefill."""

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
    """Keep freed memory in this process, by glibc's malloc; True where that was set.

    Nothing is taken from mmap and nothing given back, so the process holds the most that it ever
    needed. Another C library, another malloc (jemalloc, tcmalloc) and the user's own settings (any
    MALLOC_* or GLIBC_TUNABLES in the environment) are left alone."""
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
    """Ask for pages of 2 MiB for a tensor on a CPU that nothing was written to yet.

    Sixteen thousand tokens of a cache are a hundred thousand pages of 4 KiB, each a fault when it
    is first written."""
    library = _library()
    if library is None or not tensor.is_cpu or tensor.nbytes < 2 * _HUGE:
        return tensor
    begin = -(-tensor.data_ptr() // _HUGE) * _HUGE
    length = (tensor.data_ptr() + tensor.nbytes) // _HUGE * _HUGE - begin
    # Advice only: where it is not taken, pages are small.
    library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return tensor


@cache
def _library() -> ctypes.CDLL | None:
    """The C library where it has madvise."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "madvise") else None
