"""Memory of interpreted Triton kernels: no access outside of tensors, no races.

On a GPU neither shows as a wrong result each time; here every address of every program is known.
Kernels that misuse memory, and one that does not, test the check.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

# Of an element that no program, or more than one, has read.
NOBODY = -1
MANY = -2


class MemoryFault(AssertionError):
    """A kernel reads or writes where it must not."""


class _Launch:
    """The memory of a launch's tensors, and for each element its reader and its writer."""

    def __init__(self, kernel: str, tensors: list[torch.Tensor]) -> None:
        self.kernel = kernel
        self.program = -1
        spans = _spans(tensors)
        self.starts = np.array([start for start, _ in spans])
        self.ends = np.array([end for _, end in spans])
        sizes = self.ends - self.starts
        # Places of elements are counted in bytes, span after span.
        self.first = sizes.cumsum() - sizes
        self.reader = np.full(sizes.sum(), NOBODY)
        self.writer = np.full(sizes.sum(), NOBODY)

    def load(self, ptrs: Any, mask: Any) -> None:
        """Record reads of the running program, which no other may write to."""
        at = self._places(ptrs, mask, "reads")
        writer = self._another(self.writer[at])
        if writer is not None:
            self._fail(f"program {self.program} reads what program {writer} writes")
        before = self.reader[at]
        first = (before == NOBODY) | (before == self.program)
        self.reader[at] = np.where(first, self.program, MANY)

    def store(self, ptrs: Any, mask: Any) -> None:
        """Record writes of the running program, which no other may read or write."""
        at = self._places(ptrs, mask, "writes")
        writer = self._another(self.writer[at])
        if writer is not None:
            self._fail(f"programs {writer} and {self.program} write the same element")
        reader = self._another(self.reader[at])
        if reader is not None:
            self._fail(f"program {reader} reads what program {self.program} writes")
        self.writer[at] = self.program

    def _places(self, ptrs: Any, mask: Any, what: str) -> np.ndarray[Any, Any]:
        """Places of the addresses that the mask lets through, all of which must lie in a tensor."""
        shape = np.broadcast_shapes(ptrs.data.shape, mask.data.shape)
        wanted = np.broadcast_to(mask.data, shape)
        addresses = np.broadcast_to(ptrs.data, shape)[wanted].astype(np.int64)
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        span = np.searchsorted(self.starts, addresses, side="right") - 1
        if not ((span >= 0) & (addresses + size <= self.ends[span])).all():
            self._fail(f"program {self.program} {what} outside of the call's tensors")
        return addresses - self.starts[span] + self.first[span]

    def _another(self, programs: np.ndarray[Any, Any]) -> int | None:
        """One of the programs that is not the running one; None if there is none."""
        rest = programs[(programs != NOBODY) & (programs != self.program)]
        if not len(rest):
            return None
        return int(rest[0])

    def _fail(self, fault: str) -> None:
        raise MemoryFault(f"{self.kernel}: {fault}")


def _spans(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Start and end of the memory of these tensors' elements, merged, ascending."""
    merged = []
    for x in sorted((x for x in tensors if x.numel()), key=torch.Tensor.data_ptr):
        last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        start = x.data_ptr()
        end = start + (last + 1) * x.element_size()
        if merged and start <= merged[-1][1]:
            first, before = merged.pop()
            merged.append((first, max(before, end)))
        else:
            merged.append((start, end))
    return merged


@contextmanager
def memory_checked() -> Iterator[None]:
    """Every kernel that is interpreted meanwhile is checked; MemoryFault at the access."""
    builder = interpreter.InterpreterBuilder
    executor = interpreter.GridExecutor
    load = builder.create_masked_load
    store = builder.create_masked_store
    place = builder.set_grid_idx
    to_host = executor._init_args_hst
    function = interpreter.InterpretedFunction.__call__
    current = []
    patched = set()

    def masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        current[-1].load(ptrs, mask)
        return load(self, ptrs, mask, *rest, **more)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        current[-1].store(ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    def set_grid_idx(self: Any, *at: int) -> None:
        current[-1].program += 1
        place(self, *at)

    def init_args(self: Any, args: Any, kwargs: Any) -> Any:
        result = to_host(self, args, kwargs)
        tensors = [x for x in (*result[0], *result[1].values()) if isinstance(x, torch.Tensor)]
        current[:] = [_Launch(self.fn.__name__, tensors)]
        patched.clear()
        return result

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Triton patches its language at each call of a function, a third of the time: once a module
        # and launch is enough.
        if self.fn.__module__ in patched:
            return self.rewrite()(*args, **kwargs)
        patched.add(self.fn.__module__)
        return function(self, *args, **kwargs)

    with (
        mock.patch.object(interpreter.InterpretedFunction, "__call__", call),
        mock.patch.object(builder, "create_masked_load", masked_load),
        mock.patch.object(builder, "create_masked_store", masked_store),
        mock.patch.object(builder, "set_grid_idx", set_grid_idx),
        mock.patch.object(executor, "_init_args_hst", init_args),
    ):
        yield


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
    # Elements of a larger tensor: memory next to them belongs to other tensors.
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
