"""Costs of candidates: seconds by a device's cost table, or FLOPs.

Shapes: L layers, H query heads, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from artifacts import ModelInfo
from artifacts.schema.search import CostUnit
from kernels.index import TILE, num_rows, num_tiles
from kernels.patterns import Pattern
from search.model.candidates import LAST_Q
from search.model.cost_table import CostTable


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of heads on one prompt of `length` tokens.

    The model's own layers take `scale` times the table's seconds, and `overhead` more.

    Attributes:
        unit: seconds or FLOPs.
        length: of the prompt, in tokens.
        head_dim: of the model.
        dtype: of the attention.
        table: seconds by tiles; None where FLOPs are counted.
        scale: factor of the table's seconds.
        overhead: seconds of each head.
    """

    unit: CostUnit
    length: int
    head_dim: int
    dtype: str
    table: CostTable | None = None
    scale: float = 1.0
    overhead: float = 0.0

    @classmethod
    def flops(cls, model: ModelInfo, *, length: int, dtype: str) -> Costs:
        """FLOPs of the tiles that are computed."""
        return cls(unit="flops", length=length, head_dim=model.head_dim, dtype=dtype)

    @classmethod
    def measured(
        cls,
        table: CostTable,
        model: ModelInfo,
        *,
        length: int,
        dtype: str,
        scale: float = 1.0,
        overhead: float = 0.0,
    ) -> Costs:
        """Seconds by a device's cost table, which has all kinds of the candidates."""
        return cls(
            unit="seconds",
            length=length,
            head_dim=model.head_dim,
            dtype=dtype,
            table=table,
            scale=scale,
            overhead=overhead,
        )

    @property
    def device(self) -> str | None:
        """The table's device; None where FLOPs are counted."""
        if self.table:
            return self.table.device
        return None

    def spent(self, candidates: Sequence[Pattern], tiles: np.ndarray) -> np.ndarray:
        """Costs of heads with each candidate, index build included.

        Args:
            candidates: C patterns.
            tiles: (..., C), that each computes.

        Returns:
            (..., C).
        """
        if self.table is None:
            return tiles.astype(np.float64) * self._flops_per_tile
        seconds = np.full(tiles.shape, np.nan)
        for c, pattern in enumerate(candidates):
            x, y = self.table.line(
                pattern.kind, length=self.length, head_dim=self.head_dim, dtype=self.dtype
            )
            own = _interpolate(tiles[..., c].astype(np.float64), x, y)
            seconds[..., c] = own + self._estimate(pattern)
        return seconds * self.scale + self.overhead

    def all_keys(self) -> float:
        """The cost of a head that computes everything through the same kernel."""
        if self.table is None:
            return causal_tiles(self.length) * self._flops_per_tile
        return self._all_keys * self.scale + self.overhead

    @property
    def _all_keys(self) -> float:
        """Seconds of a head that computes everything, by the table."""
        assert self.table is not None
        x, y = self.table.line(
            "dense", length=self.length, head_dim=self.head_dim, dtype=self.dtype
        )
        return float(_interpolate(np.array([float(causal_tiles(self.length))]), x, y)[0])

    @property
    def _flops_per_tile(self) -> float:
        return 4.0 * TILE * TILE * self.head_dim

    def _estimate(self, pattern: Pattern) -> float:
        """Seconds of an estimate that reads more queries than the table's patterns do."""
        rows = (getattr(pattern, "last_q", LAST_Q) - LAST_Q) / TILE
        return max(rows, 0.0) * num_tiles(self.length) * self._all_keys / causal_tiles(self.length)


def causal_tiles(length: int) -> int:
    """Tiles of dense causal attention."""
    rows = num_rows(length, length)
    return rows * (rows + 1) // 2


def _interpolate(at: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Interpolate linearly; beyond the last point in proportion, before the first by its slope.

    A table of several head counts has several times for the same tiles of a head: their mean
    counts.
    """
    x, index = np.unique(x, return_inverse=True)
    y = np.bincount(index, weights=y) / np.bincount(index)
    inner = np.interp(at, x, y)
    if len(x) > 1:
        slope = (y[1] - y[0]) / (x[1] - x[0])
        inner = np.where(at < x[0], np.maximum(y[0] + slope * (at - x[0]), y[0] / 10), inner)
    return np.where(at > x[-1], y[-1] * at / x[-1], inner)
