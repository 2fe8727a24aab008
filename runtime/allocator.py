"""Memory of long prompts on a CPU, with few page faults: above 16K tokens those were most of a
prefill.

glibc gives pieces of more than 32 MiB back to the system when they are freed, and fetches the next
ones page by page: an activation of a long prompt is larger, so that each one was mapped, zeroed and
unmapped anew."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

from torch import Tensor

# malloc.h
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_MAX = -4
# What the heap grows by at least, in bytes: few calls of the system, and room for a layer's
# activations.
_STEP = 64 << 20
_HUGE = 2 << 20
_MADV_HUGEPAGE = 14


@cache
def keep_freed_memory() -> bool:
    """Set glibc's malloc, once for this process, to take no piece from mmap and to give none back;
    whether it did.

    The process then holds the most that it ever needed. Another C library, another malloc in its
    place (jemalloc, tcmalloc) and settings of the user's own (any MALLOC_* or GLIBC_TUNABLES in the
    environment) are left alone."""
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return False
    if any(
        name in os.environ.get("LD_PRELOAD", "") for name in ("jemalloc", "tcmalloc", "mimalloc")
    ):
        return False
    library = ctypes.CDLL(None)
    if not (hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt")):
        return False
    return all(
        library.mallopt(name, value) == 1
        for name, value in ((_TRIM_THRESHOLD, -1), (_TOP_PAD, _STEP), (_MMAP_MAX, 0))
    )


def in_huge_pages(tensor: Tensor) -> Tensor:
    """A tensor that nothing was written to yet: its memory on a CPU will come in pages of 2 MiB
    where there are such.

    Sixteen thousand tokens of a cache are a hundred thousand pages of 4 KiB, each a fault when it
    is first written."""
    if tensor.is_cpu and tensor.nbytes >= 2 * _HUGE and (library := _library()) is not None:
        begin = -(-tensor.data_ptr() // _HUGE) * _HUGE
        length = (tensor.data_ptr() + tensor.nbytes) // _HUGE * _HUGE - begin
        # An advice: where it is not taken, pages are small.
        library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return tensor


@cache
def _library() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "madvise") else None
