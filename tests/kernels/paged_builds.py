"""Layers whose keys lie in pages, and how far their indices are from those of tensors.

Shapes: B batch, G KV heads, K key length, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.patterns import LayerPlan, make
from kernels.patterns.block_sparse import mean_of_tiles
from kernels.patterns.last_queries import estimate
from kernels.patterns.paged import Paged

# By number alone, which a GPU chooses in one launch, and all that reads keys.
BY_NUMBER = (
    make("vertical_slash", vertical=80, slash=90), make("block_sparse", blocks=3), make("a_shape",
    sink=70, window=100),
    make("vertical_slash", vertical=200, slash=64, last_q=100), make("dense"), make("block_sparse",
    blocks=1),
)  # fmt: skip
EVERY = (
    *BY_NUMBER[:2], make("memory_units", sink=1, window=70, units=2, representatives=3),
    make("vertical_slash", vertical=150, slash=300, last_q=30, coverage=0.8),
    make("block_sparse", blocks=9, coverage=0.7), make("memory_units", sink=70, window=200,
    units=3),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Build:
    """A build of a layer; `cache` is the pages' dtype, `halves` their layout in vLLM on CPUs."""

    q_len: int
    k_len: int
    page: int
    batch: int = 1
    kv_heads: int = 2
    head_dim: int = 32
    dtype: torch.dtype = torch.float16
    cache: torch.dtype | None = None
    window: int | None = None
    halves: bool = False


CASES = {
    **{
        f"{q} of {k}, pages of {page}": Build(q_len=q, k_len=k, page=page)
        for q, k in ((100, 300), (257, 257), (64, 450))
        for page in (16, 64, 128, 37, 100)
    },
    "a token": Build(q_len=1, k_len=1, page=16),
    "batch 2, one KV head, D 80": Build(
        q_len=70, k_len=301, page=64, batch=2, kv_heads=1, head_dim=80
    ),
    "batch 2, pages of 1,000": Build(q_len=70, k_len=190, page=1000, batch=2),
    "window of 130": Build(q_len=130, k_len=400, page=48, window=130),
    "window of 65, pages of 192": Build(q_len=130, k_len=400, page=192, window=65),
    "keys and values of a page in turn": Build(q_len=150, k_len=310, page=64, halves=True),
    "bfloat16": Build(q_len=150, k_len=310, page=80, dtype=torch.bfloat16),
    "D 160": Build(q_len=64, k_len=130, page=64, head_dim=160),
    **{
        f"{str(cache).removeprefix('torch.')} read in {str(dtype).removeprefix('torch.')}": Build(
            q_len=100, k_len=300, page=page, dtype=dtype, cache=cache
        )
        for cache, dtype, page in (
            (torch.float8_e4m3fn, torch.float16, 16),
            (torch.float8_e4m3fn, torch.bfloat16, 64),
            (torch.float8_e5m2, torch.float16, 128),
        )
    },
}


def paged(k: Tensor, case: Build) -> Paged:
    """Keys (B, G, K, D) in pages of a cache, in any order, with NaN all around them."""
    batch, kv_heads, k_len, dim = k.shape
    each = -(-k_len // case.page)
    pages = (torch.randperm(batch * each + 3)[: batch * each]).view(batch, each)
    held = torch.full((batch * each + 3, case.page, kv_heads, dim), float("nan"))
    if case.halves:
        held = torch.full((len(held), kv_heads, 2, case.page, dim), float("nan"))[
            :, :, 0
        ].transpose(1, 2)
    held = held.to(k.device, case.cache or case.dtype)
    at = torch.arange(k_len)
    rows = k.transpose(1, 2).to(held.dtype)
    for b in range(batch):
        held[pages[b, at // case.page], at % case.page] = rows[b]
    # An engine's table goes on behind a sequence, with anything.
    table = torch.cat([pages, torch.full((batch, 2), 1 << 30)], dim=1).to(k.device, torch.int32)
    return Paged.of(held, table, [k_len] * batch, case.dtype)


def differences(case: Build, device: torch.device) -> dict[str, int]:
    """Numbers that differ between pages and a tensor, by their name."""
    torch.manual_seed(case.k_len + case.page)
    q, k = (
        torch.randn(case.batch, heads, length, case.head_dim, device=device)
        for heads, length in ((6, case.q_len), (case.kv_heads, case.k_len))
    )
    q, k = q.to(case.dtype), k.to(case.cache or case.dtype).to(case.dtype)
    where = paged(k, case)
    found: dict[str, int] = {}

    def compare(name: str, one: Tensor, other: Tensor) -> None:
        same = one.shape == other.shape and one.dtype == other.dtype
        found[name] = int((one != other).sum()) if same else -1

    how = {"scale": 0.3, "window": case.window}
    masses = [estimate(q, keys, [0, 2, 3, 5], [64, 100, 1, 64], **how) for keys in (where, k)]
    compare("vertical", masses[0][0], masses[1][0])
    compare("slash", masses[0][1], masses[1][1])
    compare(
        "means", *(mean_of_tiles(keys, list(range(case.kv_heads)), lead=0) for keys in (where, k))
    )
    for name, patterns in (("by number", BY_NUMBER), ("every", EVERY)):
        plan = LayerPlan(patterns, case.kv_heads, dense_tail=10)
        index = plan.build(q, where.cache, **how, block_table=where.table, k_len=case.k_len)
        expected = plan.build(q, k, **how)
        for part in ("diagonals", "tiles", "offsets", "columns"):
            compare(f"{part}, {name}", getattr(index, part), getattr(expected, part))
    return found
