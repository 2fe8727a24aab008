"""Bars for what a prefill and a decode step launch and allocate.

Our kernels are counted as they are launched, torch's operations as they are called, views left out:
on a GPU each is a launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kernels.attention import sparse_attention
from kernels.decode import decode_attention
from kernels.patterns import LayerPlan, make
from tests.kernels.operations import Counts, Operations
from tests.kernels.recording import recorded

pytest.importorskip("triton", reason="triton is not installed")


@contextmanager
def counting() -> Iterator[Counts]:
    """Counts of the calls meanwhile, as a GPU would get them."""
    with torch.no_grad(), recorded() as calls, Operations() as operations:
        yield operations.counts
    operations.counts.ours += [call.kernel for call in calls]


LAYER = [
    make("vertical_slash", vertical=80, slash=90),
    make("a_shape", sink=64, window=64),
    make("block_sparse", blocks=2),
    make("dense"),
]


def prefill(length: int) -> list[Counts]:
    """The first two calls of a plan: by the second what is made once for a length is there."""
    q, k, v = (torch.randn(1, heads, length, 64).half() for heads in (4, 2, 2))
    plan = LayerPlan(LAYER, 2)
    found = []
    for _ in range(2):
        with counting() as counts:
            sparse_attention(q, k, v, plan.build(q, k), backend="triton")
        found.append(counts)
    return found


def decode(length: int, **how: Any) -> list[Counts]:
    """One token over so many keys."""
    q, k, v = (
        torch.randn(1, heads, n, 64).half() for heads, n in ((4, 1), (2, length), (2, length))
    )
    with counting() as counts:
        decode_attention(q, k, v, **how, backend="triton")
    return [counts]


def scored(length: int) -> list[Counts]:
    """A prompt with summed probabilities, as H2O takes it in; the second call."""
    q, k, v = (torch.randn(1, heads, length, 64).half() for heads in (4, 2, 2))
    for _ in range(2):
        with counting() as counts:
            decode_attention(q, k, v, scores="sum", backend="triton")
    return [counts]


CHOSEN = torch.arange(64, dtype=torch.int32).expand(1, 2, 64).contiguous()
# Launches of ours and torch's operations around them: no more than there are now.
CALLS = {
    "prefill": (prefill, [(10, 70), (10, 48)]),
    "decode, chosen keys": (lambda length: decode(length, tokens=CHOSEN), [(2, 0)]),
    "decode, all keys, scores": (lambda length: decode(length, scores="sum"), [(3, 0)]),
    "prompt, scores": (scored, [(3, 0)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_launches_little_waits_for_nothing_and_allocates_no_square(name):
    call, bars = CALLS[name]
    shorter, longer = call(128), call(320)
    for short, long, (ours, others) in zip(shorter, longer, bars, strict=True):
        for counts in (short, long):
            assert len(counts.ours) <= ours and counts.torch <= others, counts
            # What is laid out for a new length is laid out on the host, where it is read.
            first = name == "prefill" and short is shorter[0]
            assert counts.waits in ([], *[["_local_scalar_dense"]] * first), counts
        assert long.largest <= short.largest * 320 // 128
        assert long.ours == short.ours
    if name == "prefill":
        # Heads with lists of tiles have a launch of their own.
        kernels = ["tables_kernel", *["sparse_attention_kernel"] * 2]
        assert shorter[1].ours[-3:] == kernels
    if name == "prompt, scores":
        kernels = ["tables_kernel", "sparse_attention_kernel", "column_sums_kernel"]
        assert shorter[0].ours == kernels


def test_what_waits_and_what_is_made_is_counted():
    with counting() as counts:
        x = torch.zeros(100)
        x.view(10, 10).T.add_(1)
        torch.empty(1000)
        float(x[0])
    assert counts.waits == ["_local_scalar_dense"] and counts.ours == []
    # zeros, add and the read; views and memory that nobody writes to launch nothing.
    assert counts.torch == 3 and counts.largest == 4000
