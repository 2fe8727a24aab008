"""Native code of the builders on the CPU: cpu.cpp, compiled at first use.

In torch each of these is a dozen operations over K columns, and every one waits for all threads.

Shapes: B batch, H query heads, h heads of one kind, G KV heads, Q query length, K key length, D
head dim."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.attention.cpu import engines
from kernels.copies import contiguous, with_rows
from kernels.native import build
from kernels.patterns.paged import Keys

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def serves(x: Keys) -> bool:
    """True if native code serves builders on these tensors or pages; else torch does."""
    return x.device.type == "cpu" and x.dtype in _DTYPES and build.load() is None


def estimate(
    q: Tensor,
    k: Keys,
    heads: Sequence[int],
    last_q: Sequence[int],
    *,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """See kernels.patterns.last_queries.estimate."""
    fastest = engines(q.dtype)[0]
    found: tuple[Tensor, Tensor] = torch.ops.headwise.vertical_slash_estimate(
        with_rows(q),
        *_where(k),
        heads,
        last_q,
        scale,
        window or 0,
        fastest,
    )
    return found


def mean_pool(x: Keys, *, lead: int) -> Tensor:
    """Mean over each tile, fp32 (B, heads, tiles, D); of the first `lead` positions miss."""
    pooled: Tensor = torch.ops.headwise.mean_pool(*_where(x), lead)
    return pooled


def _where(k: Keys) -> tuple[Tensor, Tensor | None, int]:
    """Keys as operators take them: tensor or cache, block table, and their number."""
    if isinstance(k, Tensor):
        return with_rows(k), None, k.shape[2]
    return k.cache, k.table.contiguous(), k.k_len


def best_places(
    scores: Tensor,
    sizes: Sequence[int],
    coverage: Sequence[float | None],
    *,
    forced: int,
    ends: Tensor | None,
    counts: Tensor | None,
) -> Tensor:
    """See kernels.patterns.choose.best_places."""
    shares = [share or 0.0 for share in coverage]
    lists = map(contiguous, (ends, counts))
    found: Tensor = torch.ops.headwise.best_places(
        scores.contiguous(), sizes, shares, forced, *lists
    )
    return found


def best_tiles(
    queries: Tensor,
    keys: Tensor,
    blocks: Sequence[int],
    coverage: Sequence[float | None],
    offsets: Tensor,
    *,
    first: int,
    reach: int,
    scale: float,
    total: int,
) -> Tensor:
    """The best key tiles before each row's own, ascending, padded with PAD: (total,) int32.

    queries (B, h, R, D) and keys (B, h, N, D) are fp32 means; row r stands at key tile first + r
    and sees `reach` tiles before it. Its list lies where offsets (B, h, R + 1) int64 say, and has
    room for all that may be chosen."""
    shares = [share or 0.0 for share in coverage]
    found: Tensor = torch.ops.headwise.best_tiles(
        queries.contiguous(), keys.contiguous(), blocks, shares, offsets, first, reach, scale, total
    )
    return found
