"""Dense causal attention as an index: every diagonal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from kernels.index import SparseIndex, empty_entries, num_rows, num_tiles
from kernels.patterns.base import Pattern


@dataclass(frozen=True, kw_only=True)
class Dense(Pattern):
    """All keys up to the query."""

    kind: ClassVar[str] = "dense"

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
        """See Pattern.prepare."""
        index = dense_index(q.shape[0], len(heads), q.shape[2], k.shape[2], q.device)
        return lambda patterns: index


def dense_index(batch: int, num_heads: int, q_len: int, k_len: int, device: torch.device) -> SparseIndex:
    """The index of dense causal attention for `num_heads` heads."""
    diagonals = torch.arange(num_tiles(k_len), dtype=torch.int32, device=device)
    return SparseIndex(
        q_len=q_len,
        k_len=k_len,
        diagonals=diagonals.expand(batch, num_heads, -1).contiguous(),
        tiles=empty_entries(batch, num_heads, num_rows(q_len, k_len), 0, device=device),
        columns=empty_entries(batch, num_heads, 0, device=device),
    )
