"""What candidates cost: seconds on a device by its cost table, or FLOPs.

Shapes: L layers, H query heads, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from artifacts import ModelInfo
from kernels.index import TILE, num_rows, num_tiles
from kernels.patterns import Pattern
from profiling.speed.cost_table import CostTable
from search.model.candidates import LAST_Q
from search.model.config import Unit


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What heads cost on one prompt of `length` tokens.

    table: None where FLOPs are counted. scale, overhead: what the model's own layers make of the
    table's seconds, once
        that is known: so many times those, and seconds of each head whatever it computes.
    """

    unit: Unit
    length: int
    head_dim: int
    dtype: str
    table: CostTable | None = None
    scale: float = 1.0
    overhead: float = 0.0

    @property
    def device(self) -> str | None:
        return self.table.device if self.table else None

    def of(self, candidates: Sequence[Pattern], tiles: np.ndarray) -> np.ndarray:
        """The cost of each head with each candidate, index build included, from the tiles it
        computes (..., C)."""
        if self.table is None:
            return tiles.astype(np.float64) * self._flops_per_tile
        found = np.full(tiles.shape, np.nan)
        for c, pattern in enumerate(candidates):
            # A table that was measured for all models has none that skips: that is then taken to
            # cost as much as dense.
            kind = (
                pattern.kind
                if pattern.kind != "skip_softmax" or self.table.has(pattern.kind)
                else "dense"
            )
            x, y = self.table.line(
                kind, length=self.length, head_dim=self.head_dim, dtype=self.dtype
            )
            found[..., c] = _interpolate(tiles[..., c].astype(np.float64), x, y) + self._estimate(
                pattern
            )
        return found * self.scale + self.overhead

    def all_keys(self) -> float:
        """The cost of a head that computes everything through the same kernel."""
        if self.table is None:
            return _causal_tiles(self.length) * self._flops_per_tile
        return self._all_keys * self.scale + self.overhead

    def brought_to(self, *, scale: float, overhead: float) -> Costs:
        """With what the model's own layers make of the table's seconds."""
        return replace(self, scale=scale, overhead=overhead)

    @property
    def _all_keys(self) -> float:
        """The table's seconds of a head that computes everything."""
        assert self.table is not None
        x, y = self.table.line(
            "dense", length=self.length, head_dim=self.head_dim, dtype=self.dtype
        )
        return float(_interpolate(np.array([float(_causal_tiles(self.length))]), x, y)[0])

    @property
    def _flops_per_tile(self) -> float:
        return 4.0 * TILE * TILE * self.head_dim

    def _estimate(self, pattern: Pattern) -> float:
        """Seconds of estimates that look at more queries than those that the table was measured
        with."""
        rows = (getattr(pattern, "last_q", LAST_Q) - LAST_Q) / TILE
        return max(rows, 0.0) * num_tiles(self.length) * self._all_keys / _causal_tiles(self.length)


def flops(model: ModelInfo, *, length: int, dtype: str) -> Costs:
    """FLOPs of the tiles that are computed."""
    return Costs(unit="flops", length=length, head_dim=model.head_dim, dtype=dtype)


def costs_by(table: CostTable, model: ModelInfo, *, length: int, dtype: str) -> Costs:
    """Seconds by a device's cost table.

    Raises:
        HeadwiseError: the table does not hold the model's head dim and dtype for the kinds that are
        searched.
    """
    for kind in ("a_shape", "vertical_slash", "block_sparse", "dense"):
        table.line(kind, length=length, head_dim=model.head_dim, dtype=dtype)
    return Costs(unit="seconds", length=length, head_dim=model.head_dim, dtype=dtype, table=table)


def _causal_tiles(length: int) -> int:
    rows = num_rows(length, length)
    return rows * (rows + 1) // 2


def _interpolate(at: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Piecewise linear; beyond the last point in proportion, before the first along the first two
    points.

    A table of several head counts has several times for the same tiles of a head: their mean
    counts."""
    x, index = np.unique(x, return_inverse=True)
    y = np.bincount(index, weights=y) / np.bincount(index)
    inner = np.interp(at, x, y)
    if len(x) > 1:
        slope = (y[1] - y[0]) / (x[1] - x[0])
        inner = np.where(at < x[0], np.maximum(y[0] + slope * (at - x[0]), y[0] / 10), inner)
    return np.where(at > x[-1], y[-1] * at / x[-1], inner)
