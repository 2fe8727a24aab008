"""bfloat16 in Triton's interpreter, rounded as on a device; by itself it cuts off.

Triton 3.9 keeps bfloat16 as 16-bit integers. Here products are of the numbers and are added up in
float32, other operations are done in float32 and rounded, and what is stored as bfloat16 is rounded
to nearest, ties to even."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch


def widened(bits: Any) -> Any:
    """float32 numbers from the bits of bfloat16 ones."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def rounded(numbers: Any) -> Any:
    """The bits of the nearest bfloat16 numbers, as torch rounds."""
    numbers = np.ascontiguousarray(numbers, np.float32)
    return torch.from_numpy(numbers).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Interpreted kernels do this meanwhile."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    own = {
        name: getattr(InterpreterBuilder, name)
        for name in ("create_dot", "cast_impl", "create_fp_to_fp", "binary_op", "unary_op")
    }

    def is_bfloat16(x: Any) -> bool:
        return x.dtype.scalar == tl.bfloat16

    def wide(x: Any) -> Any:
        return TensorHandle(widened(x.data), tl.float32) if is_bfloat16(x) else x

    def narrow(x: Any) -> Any:
        return TensorHandle(rounded(x.data), tl.bfloat16) if x.data.dtype == np.float32 else x

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return own["create_dot"](self, wide(a), wide(b), *rest)

    def cast(name: str) -> Any:
        def call(self: Any, x: Any, to: Any, *rest: Any) -> Any:
            if not is_bfloat16(x) and to.scalar != tl.bfloat16:
                return own[name](self, x, to, *rest)
            x = wide(x)
            if to.scalar != tl.bfloat16:
                return x if to.scalar == tl.float32 else own[name](self, x, to, *rest)
            return TensorHandle(rounded(x.data.astype(np.float32)), tl.bfloat16)

        return call

    def binary(self: Any, one: Any, other: Any, op: Any) -> Any:
        if not is_bfloat16(one):
            return own["binary_op"](self, one, other, op)
        return narrow(own["binary_op"](self, wide(one), wide(other), op))

    def unary(self: Any, x: Any, op: Any) -> Any:
        return (
            narrow(own["unary_op"](self, wide(x), op))
            if is_bfloat16(x)
            else own["unary_op"](self, x, op)
        )

    calls = {"create_dot": dot, "binary_op": binary, "unary_op": unary}
    calls |= {name: cast(name) for name in ("cast_impl", "create_fp_to_fp")}
    with ExitStack() as stack:
        for name, call in calls.items():
            stack.enter_context(mock.patch.object(InterpreterBuilder, name, call))
        yield
