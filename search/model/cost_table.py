"""Cost table of a device: measured seconds by pattern, length and tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from artifacts import HeadwiseError


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One measurement of all query heads of a layer at once; tiles and seconds are the layer's.

    Attributes:
        tiles: 64 x 64, as the kernel executes them.
        seconds: of attention and its index.
        dense_seconds: of Headwise's kernel over every key, in the same rounds: it shows a machine
            that became slower.
    """

    pattern: str
    dtype: str
    length: int
    head_dim: int
    heads: int
    tiles: int
    seconds: float
    dense_seconds: float


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """All measurements of one device."""

    device: str
    costs: tuple[Cost, ...]

    def line(
        self, pattern: str, *, length: int, head_dim: int, dtype: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Read one head's measurements: ascending tiles and their seconds at `length` tokens.

        From the nearest length by ratio: seconds and tiles both go with the rows, for the same
        tiles a row.

        Raises:
            HeadwiseError: nothing was measured for the pattern, head dim or dtype.
        """
        rows = [
            c for c in self.costs if (c.pattern, c.head_dim, c.dtype) == (pattern, head_dim, dtype)
        ]
        near = self._nearest(rows, length, f"{pattern} with head dim {head_dim} in {dtype}")
        known = sorted((c.tiles / c.heads, c.seconds / c.heads) for c in near)
        x, y = (np.array(values) * length / near[0].length for values in zip(*known, strict=True))
        return x, y

    def dense_seconds(self, *, length: int, head_dim: int, dtype: str, heads: int) -> float:
        """Seconds of the dense kernel, from the nearest length by the square of both."""
        rows = [c for c in self.costs if (c.head_dim, c.dtype) == (head_dim, dtype)]
        near = self._nearest(rows, length, f"head dim {head_dim} in {dtype}")
        per_head = float(np.median([c.dense_seconds / c.heads for c in near]))
        return per_head * heads * (length / near[0].length) ** 2

    def _nearest(self, rows: Sequence[Cost], length: int, measurement: str) -> list[Cost]:
        if not rows:
            known = sorted({(c.pattern, c.head_dim, c.dtype) for c in self.costs})
            held = ", ".join(map(str, known)) or "nothing"
            raise HeadwiseError(f"the cost table has no {measurement}; it has: {held}")
        best = min({c.length for c in rows}, key=lambda n: abs(np.log(n / length)))
        return [c for c in rows if c.length == best]
