"""Memory of interpreted Triton kernels: no access outside of tensors, no races.

On a GPU neither shows as a wrong result each time; here every address of every program is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch


class MemoryFault(AssertionError):
    """A kernel reads or writes where it must not."""


@dataclass(eq=False)
class _Launch:
    """Memory of a launch, and its programs' accesses: (program, addresses of elements)."""

    kernel: str
    starts: np.ndarray[Any, Any]
    ends: np.ndarray[Any, Any]
    program: int = -1
    loads: list[tuple[int, np.ndarray[Any, Any]]] = field(default_factory=list)
    stores: list[tuple[int, np.ndarray[Any, Any]]] = field(default_factory=list)

    def record(self, ptrs: Any, mask: Any, into: list[tuple[int, np.ndarray[Any, Any]]]) -> None:
        """Keep the addresses that the mask lets through, all of which must lie in a tensor."""
        at = np.broadcast_to(ptrs.data, np.broadcast_shapes(ptrs.data.shape, mask.data.shape))
        found = np.unique(at[np.broadcast_to(mask.data, at.shape)].astype(np.uint64))
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        place = np.searchsorted(self.starts, found, side="right") - 1
        inside = (place >= 0) & (found + np.uint64(size) <= self.ends[np.maximum(place, 0)])
        if not inside.all():
            what = "writes" if into is self.stores else "reads"
            raise MemoryFault(
                f"{self.kernel}: program {self.program} {what} outside of the call's tensors"
            )
        into.append((self.program, found))

    def check(self) -> None:
        """No element is written by two programs, or read by one and written by another."""
        if not self.stores:
            return
        at, by = _joined(self.stores)
        again = (at[1:] == at[:-1]) & (by[1:] != by[:-1])
        if again.any():
            i = int(again.argmax())
            raise MemoryFault(
                f"{self.kernel}: programs {by[i]} and {by[i + 1]} write the same element"
            )
        read, reader = _joined(self.loads)
        place = np.minimum(np.searchsorted(at, read), len(at) - 1)
        wrong = (at[place] == read) & (by[place] != reader)
        if wrong.any():
            i = int(wrong.argmax())
            raise MemoryFault(
                f"{self.kernel}: program {reader[i]} reads what program {by[place[i]]} writes"
            )


def _joined(
    records: list[tuple[int, np.ndarray[Any, Any]]],
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Addresses, ascending, and the program of each."""
    if not records:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    at = np.concatenate([addresses for _, addresses in records])
    by = np.concatenate([np.full(len(addresses), program) for program, addresses in records])
    order = np.lexsort((by, at))
    return at[order], by[order]


def _memory(tensors: list[torch.Tensor]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Starts and ends of the memory of these tensors' elements, merged, ascending."""
    spans = []
    for x in tensors:
        if x.numel():
            last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
            spans.append((x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()))
    merged: list[list[int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    starts, ends = zip(*merged, strict=True)
    return np.array(starts, np.uint64), np.array(ends, np.uint64)


@contextmanager
def memory_checked() -> Iterator[list[str]]:
    """Every kernel that is interpreted meanwhile is checked; the names of those launched, in order.

    Raises:
        MemoryFault: at the access or, for a race, when the launch has ended.
    """
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, place = (
        builder.create_masked_load,
        builder.create_masked_store,
        builder.set_grid_idx,
    )
    to_host, call = executor._init_args_hst, executor.__call__
    current: list[_Launch] = []
    names: list[str] = []

    def masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        current[-1].record(ptrs, mask, current[-1].loads)
        return load(self, ptrs, mask, *rest, **more)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        current[-1].record(ptrs, mask, current[-1].stores)
        return store(self, ptrs, value, mask, *rest)

    def set_grid_idx(self: Any, *at: int) -> None:
        current[-1].program += 1
        place(self, *at)

    def init_args(self: Any, args: Any, kwargs: Any) -> Any:
        found = to_host(self, args, kwargs)
        tensors = [x for x in (*found[0], *found[1].values()) if isinstance(x, torch.Tensor)]
        current.append(_Launch(self.fn.__name__, *_memory(tensors)))
        return found

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        names.append(self.fn.__name__)
        try:
            call(self, *args, **kwargs)
            current[-1].check()
        finally:
            current.clear()

    with (
        mock.patch.object(builder, "create_masked_load", masked_load),
        mock.patch.object(builder, "create_masked_store", masked_store),
        mock.patch.object(builder, "set_grid_idx", set_grid_idx),
        mock.patch.object(executor, "_init_args_hst", init_args),
        mock.patch.object(executor, "__call__", launch),
    ):
        yield names
