"""A small kernel in bfloat16, as on a device and as interpreted; prints faults as JSON.

TRITON_INTERPRET=1 python -m tests.kernels.bfloat16_cases
"""

from __future__ import annotations

import contextlib
import json

import torch
import triton
import triton.language as tl

from tests.kernels import bfloat16

N = tl.constexpr(32)


@triton.jit
def some_kernel(a, b, products, sums, odd):
    """Products of matrices and sums in bfloat16, and which numbers are NaN or infinite."""
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x, y = tl.load(a + at), tl.load(b + at)
    finite = (x == x) & (tl.abs(x) != float("inf"))
    tl.store(odd + at, 1 - finite.to(tl.int32))
    x = tl.where(finite, x, 0.0)
    tl.store(products + at, tl.dot(x, y).to(tl.bfloat16))
    tl.store(sums + at, x + y)


def wrong() -> dict[str, int]:
    """Elements of each result that are not torch's, to the bit."""
    torch.manual_seed(0)
    # Few bits, so that sums of products are exact in whatever order they are added up.
    a, b = ((torch.randn(2, N.value, N.value) * 16).round() / 16).to(torch.bfloat16)
    # Ties, to even and to odd, and what carries into the exponent.
    a[0, :4] = torch.tensor([1.0, 1.0078125, 255.0, -255.0])
    b[0, :4] = torch.tensor([0.00390625, 0.00390625, 0.5, -0.5])
    a[1, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    products, sums = torch.empty_like(a), torch.empty_like(a)
    odd = torch.empty(a.shape, dtype=torch.int32)
    some_kernel[(1,)](a, b, products, sums, odd)
    finite = a.where(a.isfinite(), 0)
    expected = (
        (finite.float() @ b.float()).to(torch.bfloat16),
        finite + b,
        (~a.isfinite()).to(torch.int32),
    )
    names = ("products", "sums", "odd")
    return {
        name: int((one != other).sum())
        for name, one, other in zip(names, (products, sums, odd), expected, strict=True)
    }


if __name__ == "__main__":
    found = {}
    for name, how in (
        ("device", bfloat16.as_on_a_device()),
        ("interpreter", contextlib.nullcontext()),
    ):
        with how:
            found[name] = wrong()
    print(json.dumps(found))
