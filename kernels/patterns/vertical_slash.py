"""Vertical-slash: columns and diagonals chosen at run time (MInference 1.0, Algorithms 2, 4).

A build is `estimate`, which reads q and k, and `select`, which selects by the estimate.

Shapes: B batch, h heads of this kind, K key length, N key tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from kernels.index import TILE, SparseIndex, no_lists, num_rows, num_tiles
from kernels.patterns.base import SHARE, Builder, Inputs, Pattern
from kernels.patterns.last_queries import estimate
from kernels.topk import ascending, top_k_indices


@dataclass(frozen=True, kw_only=True)
class VerticalSlash(Pattern):
    """The `vertical` columns and `slash` diagonals most attended to by the last `last_q` queries.

    With a `coverage`, only the smallest sets of columns and of diagonals that each hold this share
    of that attention, still at most `vertical` and `slash` of them (FlexPrefill, Lai 2025,
    Algorithm 3). The first tile of columns and the first TILE diagonals are always among them and
    count towards both sizes."""

    kind: ClassVar[str] = "vertical_slash"
    growing: ClassVar[tuple[str, ...]] = ("vertical", "slash")

    vertical: int
    slash: int
    last_q: int = 64
    coverage: float | None = field(default=None, metadata=SHARE)

    @classmethod
    def prepare(cls, largest: Sequence[Self], inputs: Inputs) -> Builder:
        """See Pattern.prepare."""
        heads, q, k, scale, window = inputs
        masses = estimate(q, k, heads, [p.last_q for p in largest], scale=scale, window=window)
        # The function holds the masses, not the queries.
        q_len = q.shape[2]
        return lambda patterns: select(*masses, patterns, q_len=q_len)


def select(
    vertical: Tensor, slash: Tensor, patterns: Sequence[VerticalSlash], *, q_len: int
) -> SparseIndex:
    """The index of each head's best columns and diagonals by mass (B, h, K) (Algorithm 4).

    A diagonal at distance s crosses the tiles at offsets floor(s / TILE) and ceil(s / TILE), in
    every row alike."""
    (batch, heads, k_len) = vertical.shape
    device = vertical.device
    n = num_tiles(k_len)
    coverage = [p.coverage for p in patterns]
    columns = top_k_indices(
        vertical, [max(p.vertical, TILE) for p in patterns], coverage, forced=TILE
    )
    distance = top_k_indices(
        slash, [max(p.slash, TILE) for p in patterns], coverage, forced=TILE
    ).to(torch.int64)
    offsets = torch.zeros(batch, heads, n + 1, dtype=torch.bool, device=device)
    for rounding in (0, TILE - 1):
        offsets.scatter_(-1, ((distance + rounding) // TILE).clamp_max_(n), True)
    return SparseIndex.built(
        q_len=q_len,
        k_len=k_len,
        diagonals=ascending(offsets[..., :n], min(n, 2 * distance.shape[-1])),
        **no_lists(batch, heads, num_rows(q_len, k_len), device=device),
        columns=columns,
    )
