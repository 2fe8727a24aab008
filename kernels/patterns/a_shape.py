"""A-shape: attention sinks and a local window (MInference 1.0, section 3; StreamingLLM)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from kernels.index import PAD, TILE, SparseIndex, empty_entries, num_rows, num_tiles
from kernels.patterns.base import Pattern


@dataclass(frozen=True, kw_only=True)
class AShape(Pattern):
    """The first `sink` keys and the last `window` keys before each query, both in tokens.

    Whole tiles are computed, so a query may see up to 2 * (TILE - 1) keys more than its window. The first tile is
    always kept.
    """

    kind: ClassVar[str] = "a_shape"

    sink: int
    window: int

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
        """See Pattern.prepare. Static: reads no tensor data."""
        batch, q_len, k_len, device = q.shape[0], q.shape[2], k.shape[2], q.device
        n = num_tiles(k_len)

        def build(patterns: Sequence[Self]) -> SparseIndex:
            # A window of w tokens reaches back over w - 1 positions: this many tiles beside the query's own.
            reach = [min((p.window - 1 + TILE - 1) // TILE, n - 1) for p in patterns]
            sinks = [min(max(p.sink, TILE), k_len) for p in patterns]
            return SparseIndex(
                q_len=q_len,
                k_len=k_len,
                diagonals=_first([r + 1 for r in reach], batch, device),
                tiles=empty_entries(batch, len(heads), num_rows(q_len, k_len), 0, device=device),
                columns=_first(sinks, batch, device),
            )

        return build


def _first(counts: Sequence[int], batch: int, device: torch.device) -> Tensor:
    """0, 1, ... counts[head] - 1 for each head, padded: (batch, heads, max count)."""
    at = torch.arange(max(counts), dtype=torch.int32, device=device)
    limit = torch.tensor(counts, dtype=torch.int32, device=device)[:, None]
    return torch.where(at < limit, at, PAD).expand(batch, -1, -1).contiguous()
