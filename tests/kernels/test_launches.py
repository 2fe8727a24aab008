"""Limits on the launches and allocations of a prefill and a decode step.

Our kernels are counted as they are launched, torch's operations as they are called, views left out:
on a GPU each is a launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.attention import sparse_attention
from kernels.decode import decode_attention
from kernels.patterns import LayerPlan, Pattern, make
from tests.conformance.builder_cases import BY_NUMBER, EVERY, Build, paged
from tests.kernels.recording import recorded

# What makes the host wait for the device.
WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "item")
# Launch nothing: they create views or reserve memory.
FREE = ("detach", "alias", "lift_fresh", "set_", "resize_")
RESERVE = ("empty", "empty_like", "empty_strided", "new_empty")


@dataclass(kw_only=True)
class Counts:
    """Counts of one call; largest: bytes of the largest tensor that it made."""

    ours: list[str] = field(default_factory=list)
    torch: int = 0
    waits: list[str] = field(default_factory=list)
    largest: int = 0


class Operations(TorchDispatchMode):
    """Counts torch operations and the tensors they allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        name = func.overloadpacket.__name__
        if name in WAITS:
            self.counts.waits.append(name)
        if name not in FREE + RESERVE:
            self.counts.torch += 1
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor):
                self.counts.largest = max(self.counts.largest, x.numel() * x.element_size())
        return result


@contextmanager
def counting() -> Iterator[Counts]:
    """Counts of the calls meanwhile, as a GPU would get them."""
    pytest.importorskip("triton", reason="triton is not installed")
    with torch.no_grad(), recorded() as calls, Operations() as operations:
        yield operations.counts
    operations.counts.ours += [call.kernel for call in calls]


# Every kind; heads that list tiles need a separate launch if none skips.
UNLIKE = [
    make("vertical_slash", vertical=80, slash=90),
    make("a_shape", sink=64, window=64),
    make("block_sparse", blocks=2),
    make("dense"),
    make("vertical_slash", vertical=80, slash=90, last_q=100, coverage=0.9),
    make("block_sparse", blocks=3, coverage=0.9),
]
SKIPPING = [*UNLIKE[:5], make("skip_softmax", scale_factor=3.0)]


def prefill(length: int, patterns: Sequence[Pattern], window: int | None = None) -> list[Counts]:
    """Count the first two calls of a plan; the second one reuses per-length constants."""
    q, k, v = (torch.randn(1, heads, length, 64).half() for heads in (6, 2, 2))
    plan = LayerPlan(patterns, 2)
    measured = []
    for _ in range(2):
        with counting() as counts:
            index = plan.build(q, k, window=window)
            sparse_attention(q, k, v, index, backend="triton")
        measured.append(counts)
    return measured


def decode(length: int, **how: Any) -> list[Counts]:
    """Count a decode step of one token over `length` keys."""
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
CALLS = {
    "prefill": partial(prefill, patterns=UNLIKE),
    "prefill, window": partial(prefill, patterns=UNLIKE, window=100),
    "prefill, skipping": partial(prefill, patterns=SKIPPING),
    "decode, chosen keys": lambda length: decode(length, tokens=CHOSEN),
    "decode, all keys, scores": lambda length: decode(length, scores="sum"),
    "prompt, scores": scored,
}
# The last launches of calls that could be served more slowly.
LAST = {
    # Only heads that list tiles have one program per query tile.
    "prefill": ["tables_kernel", *["sparse_attention_kernel"] * 2],
    # One pass writes the output, another the sums.
    "prompt, scores": ["tables_kernel", "sparse_attention_kernel", "column_sums_kernel"],
}


@pytest.mark.parametrize("name", CALLS)
def test_call_launches_few_kernels_without_waits_or_square_buffers(name):
    for short, long in zip(CALLS[name](128), CALLS[name](320), strict=True):
        for counts in (short, long):
            # From queries, keys and values to the output of a layer, whatever kinds its heads are.
            assert 1 < len(counts.ours) + counts.torch <= 10, counts
            assert counts.waits == [], counts
            assert counts.ours[-3:] == LAST.get(name, counts.ours[-3:])
        assert long.largest <= short.largest * 320 // 128
        assert long.ours == short.ours


@pytest.mark.usefixtures("builder")
@pytest.mark.parametrize("patterns", [BY_NUMBER, EVERY])
def test_short_chunk_allocates_nothing_as_large_as_the_past(patterns, monkeypatch):
    """A short chunk after a long past; torch's scratch has a fixed size and is small here."""
    monkeypatch.setattr("kernels.patterns.paged._AT_ONCE", 512)
    monkeypatch.setattr("kernels.patterns.block_sparse._SCRATCH_BYTES", {"cpu": 1 << 16})
    k_len = 16_384
    q, k = torch.randn(1, 6, 8, 128).half(), torch.randn(1, 2, k_len, 128).half()
    where = paged(k, Build(q_len=8, k_len=k_len, page=64))
    with Operations() as operations:
        LayerPlan(patterns, 2).build(q, where.cache, block_table=where.table, k_len=k_len)
    assert operations.counts.largest <= k.nbytes // 4
