"""Dense causal attention as an index: every diagonal."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch

from kernels.index import PAD, SparseIndex, empty_entries, no_lists, num_rows, num_tiles
from kernels.patterns.base import Pattern
from kernels.ragged import Ragged


@dataclass(frozen=True, kw_only=True)
class Dense(Pattern):
    """All keys up to the query."""

    kind: ClassVar[str] = "dense"

    def limits(self) -> tuple[int, int]:
        """See Pattern.limits."""
        return 0, PAD


@lru_cache(maxsize=64)
def dense_index(
    batch: int,
    num_heads: int,
    q_len: int,
    k_len: int,
    device: torch.device,
    *,
    window: int | None = None,
    ragged: Ragged | None = None,
) -> SparseIndex:
    """The index of dense causal attention for `num_heads` heads, one a shape; not to be written to.

    With `ragged` the batch is its sequences, and the lengths are the largest of them.
    """
    rows = num_rows(q_len, k_len)
    if ragged is not None:
        rows = max(num_rows(*each) for each in ragged.lengths)
    with torch.inference_mode(False):
        diagonals = torch.arange(num_tiles(k_len), dtype=torch.int32, device=device)
        return SparseIndex.built(
            q_len=q_len,
            k_len=k_len,
            diagonals=diagonals.expand(batch, num_heads, -1).contiguous(),
            **no_lists(batch, num_heads, rows, device=device),
            columns=empty_entries(batch, num_heads, 0, device=device),
            window=window,
            ragged=ragged,
        )
