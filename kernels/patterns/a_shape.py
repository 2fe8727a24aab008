"""A-shape: the first keys and a window before each query (MInference 1.0; StreamingLLM).

Shapes: B batch, h heads of this kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from kernels.copies import DeviceConstant, sized_cache
from kernels.index import PAD, TILE, SparseIndex, no_lists, num_rows, num_tiles
from kernels.patterns.base import Builder, Inputs, Pattern


@dataclass(frozen=True, kw_only=True)
class AShape(Pattern):
    """The first `sink` keys and the last `window` keys before each query, both in tokens.

    MInference 1.0, section 3; StreamingLLM.

    Whole tiles are computed, so a query may see up to 2 * (TILE - 1) keys more than its window. The
    first tile is always kept."""

    kind: ClassVar[str] = "a_shape"
    growing: ClassVar[tuple[str, ...]] = ("window",)

    sink: int
    window: int

    @classmethod
    def prepare(cls, largest: Sequence[Self], inputs: Inputs) -> Builder:
        """See Pattern.prepare. A sliding window is left to whoever reads the index."""
        batch = inputs.q.shape[0]
        q_len = inputs.q.shape[2]
        k_len = inputs.k.shape[2]
        device = inputs.q.device

        def build(patterns: Sequence[Self]) -> SparseIndex:
            diagonals, columns = (
                copy.read() for copy in _entries(tuple(patterns), batch, k_len, device)
            )
            return SparseIndex.built(
                q_len=q_len,
                k_len=k_len,
                diagonals=diagonals,
                **no_lists(batch, len(patterns), num_rows(q_len, k_len), device=device),
                columns=columns,
            )

        return build


@sized_cache(lambda copies: sum(copy.nbytes for copy in copies), 1 << 26)
def _entries(
    patterns: tuple[AShape, ...], batch: int, k_len: int, device: torch.device
) -> tuple[DeviceConstant, DeviceConstant]:
    """Diagonals and columns (B, h, any width), made once for each length; not to be written to."""
    tiles_before = num_tiles(k_len) - 1
    with torch.inference_mode(False):
        diagonals = _counted([min(num_tiles(p.window - 1), tiles_before) + 1 for p in patterns])
        columns = _counted([min(max(p.sink, TILE), k_len) for p in patterns])
        return (
            DeviceConstant.from_host(diagonals.expand(batch, -1, -1).contiguous(), device),
            DeviceConstant.from_host(columns.expand(batch, -1, -1).contiguous(), device),
        )


def _counted(counts: Sequence[int]) -> Tensor:
    """0, 1 ... counts[i] - 1 for each pattern i: (h, any width) int32, padded."""
    at = torch.arange(max(counts), dtype=torch.int32, device="cpu")
    limit = torch.tensor(counts, dtype=torch.int32, device="cpu")[:, None]
    return torch.where(at < limit, at, PAD)
