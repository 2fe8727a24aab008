"""What a search with one budget for the model found, before it is written.

Shapes: L layers, H query heads, C candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from profiling.quality.sequences import TokenSequence
from search.model.allocation import Heads
from search.model.costs import Costs
from search.model.curves import Curves
from search.model.gate import Gated
from search.model.refine import Trial
from search.model.setup import Setup


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What a search found. budget: the share of all of attention that could be spent. curves: by length and tail."""

    setup: Setup
    budget: float
    curves: Mapping[int, Mapping[int, Curves]]
    costs: Costs
    heads: Heads
    trials: tuple[Trial, ...]
    gated: Gated
    calibration: Sequence[TokenSequence]
    gradient_fault: str | None

    def density(self, tail: int) -> np.ndarray:
        """(L, H, C) tiles computed over those of dense attention."""
        tiles = self.heads.curves[tail].tiles
        dense = next(c for c, pattern in enumerate(self.setup.patterns) if pattern.kind == "dense")
        share: np.ndarray = tiles / tiles[..., dense : dense + 1]
        return share
