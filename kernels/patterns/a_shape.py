"""A-shape: the first keys and a window before each query (MInference 1.0; StreamingLLM)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernels.index import TILE, num_tiles
from kernels.patterns.base import Pattern


@dataclass(frozen=True, kw_only=True)
class AShape(Pattern):
    """The first `sink` keys and the last `window` keys before each query, both in tokens.

    MInference 1.0, section 3; StreamingLLM.

    Whole tiles are computed, so a query may see up to 2 * (TILE - 1) keys more than its window. The
    first tile is always kept. A sliding window is left to whoever reads the index.
    """

    kind: ClassVar[str] = "a_shape"
    growing: ClassVar[tuple[str, ...]] = ("window",)

    sink: int
    window: int

    def limits(self) -> tuple[int, int]:
        """See Pattern.limits."""
        return max(self.sink, TILE), num_tiles(self.window - 1) + 1
