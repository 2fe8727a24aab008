"""Block-sparse: the key tiles nearest in the mean to each query tile (MInference 1.0, Algorithm 3).

Shapes: B batch, h heads of this kind, R query tiles, N key tiles, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from kernels.index import PAD, TILE, SparseIndex, empty_entries, num_rows, num_tiles
from kernels.patterns.base import Pattern

# Bytes of fp32 tile scores held at once: bounds memory at 1M tokens.
_SCRATCH_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True)
class BlockSparse(Pattern):
    """For each query tile the `blocks` key tiles whose mean key has the largest product with the mean query.

    The query's own tile and the first tile are always among them, so that 1 and 2 blocks are the same.
    """

    kind: ClassVar[str] = "block_sparse"

    blocks: int

    @classmethod
    def prepare(
        cls,
        largest: Sequence[Self],
        heads: Sequence[int],
        q: Tensor,
        k: Tensor,
        *,
        scale: float,
        window: int | None = None,
    ) -> Callable[[Sequence[Self]], SparseIndex]:
        """See Pattern.prepare. `scale` does not change an order and is not used."""
        ranked = rank(q, k, heads, max(p.blocks for p in largest))
        q_len, k_len = q.shape[2], k.shape[2]
        return lambda patterns: select(ranked, [p.blocks for p in patterns], q_len=q_len, k_len=k_len)


def rank(q: Tensor, k: Tensor, heads: Sequence[int], most: int) -> Tensor:
    """Key tiles before each query tile's own, best first: (B, h, R, W) int64, padded; W = min(max(most, 2), N) - 1."""
    batch, num_heads, q_len, _ = q.shape
    group, k_len = num_heads // k.shape[1], k.shape[2]
    first, n, rows = (k_len - q_len) // TILE, num_tiles(k_len), num_rows(q_len, k_len)
    width = min(max(most, 2), n) - 1
    pooled_q = _pool(q[:, list(heads)], lead=(k_len - q_len) % TILE)
    pooled_k = _pool(k, lead=0)[:, [head // group for head in heads]].transpose(2, 3)
    ranked = torch.empty(batch, len(heads), rows, width, dtype=torch.int64, device=q.device)
    tile = torch.arange(n, device=q.device)
    step = max(1, _SCRATCH_BYTES // (4 * batch * len(heads) * n))
    for start in range(0, rows if width else 0, step):
        scores = pooled_q[:, :, start : start + step] @ pooled_k
        scores[..., 0] = float("inf")
        own = torch.arange(start, start + scores.shape[2], device=q.device)[:, None] + first
        scores.masked_fill_(tile >= own, float("-inf"))
        best = scores.topk(width, dim=-1).indices
        ranked[:, :, start : start + step] = torch.where(best < own, best, PAD)
    return ranked


def select(ranked: Tensor, blocks: Sequence[int], *, q_len: int, k_len: int) -> SparseIndex:
    """The index of the own tile and the best `blocks[i] - 1` others, at least one, of each head i."""
    batch, heads, _, width = ranked.shape
    others = [max(count, 2) - 1 for count in blocks]
    limit = torch.tensor(others, device=ranked.device)[:, None, None]
    place = torch.arange(width, device=ranked.device)
    kept = torch.where(place < limit, ranked, PAD).to(torch.int32).sort(dim=-1).values
    return SparseIndex(
        q_len=q_len,
        k_len=k_len,
        diagonals=torch.zeros(batch, heads, 1, dtype=torch.int32, device=ranked.device),
        tiles=kept[..., : max(others)].contiguous(),
        columns=empty_entries(batch, heads, 0, device=ranked.device),
    )


def _pool(x: Tensor, *, lead: int) -> Tensor:
    """Mean over each tile of positions, fp32 (B, heads, tiles, D); `lead` positions of the first tile are missing."""
    batch, heads, length, dim = x.shape
    tail = -(lead + length) % TILE
    whole = torch.nn.functional.pad(x, (0, 0, lead, tail)) if lead or tail else x
    sums = whole.reshape(batch, heads, -1, TILE, dim).sum(3, dtype=torch.float32)
    count = torch.full((sums.shape[2], 1), float(TILE), device=x.device)
    count[0] -= lead
    count[-1] -= tail
    return sums / count
