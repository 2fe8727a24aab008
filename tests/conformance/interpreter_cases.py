"""Kernels that misuse memory, and one that does not: what the check of interpreted memory finds."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tests.conformance.triton_memory import memory_checked


@triton.jit
def right(x, y, n, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at, mask=at < n, other=0.0), mask=at < n)


@triton.jit
def reads_beyond(x, y, n, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at), mask=at < n)


@triton.jit
def writes_before(x, y, n, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + at - 1, tl.load(x + at, mask=at < n, other=0.0), mask=at < n)


@triton.jit
def writes_twice(x, y, n, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + at // 3, tl.load(x + at, mask=at < n, other=0.0), mask=at < n)


@triton.jit
def reads_another_s(x, y, n, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + at, tl.load(y + n - 1 - at, mask=at < n, other=0.0), mask=at < n)


KERNELS = (right, reads_beyond, writes_before, writes_twice, reads_another_s)


def memory_fault(kernel: Any) -> str:
    """Report of the check on one launch; empty where all is well."""
    # Elements of a larger tensor: memory beside them belongs to somebody else.
    x, y = torch.zeros(20)[4:14], torch.zeros(20)[4:14]
    try:
        with memory_checked():
            kernel[(3,)](x, y, 10, SIZE=4)
    except Exception as error:
        return str(error)
    return ""


def reports() -> dict[str, str]:
    """Reports on all kernels, by name."""
    return {kernel.fn.__name__: memory_fault(kernel) for kernel in KERNELS}
