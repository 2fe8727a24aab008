"""What a search with one budget for the model found, before it is written.

Shapes: L layers, H query heads, C candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from artifacts import ModelInfo
from kernels.patterns import Pattern
from profiling.models.loading import LoadedModel
from profiling.prompts.held_out import Seen
from profiling.quality.sequences import TokenSequence
from search.model.allocation import Heads
from search.model.config import ModelSearch
from search.model.costs import Costs
from search.model.curves import Curves
from search.model.gate import Gated
from search.model.refine import Trial


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What a search found, to be written; budget: the share of all of attention that could be spent."""

    config: ModelSearch
    budget: float
    loaded: LoadedModel
    model: ModelInfo
    backend: str
    searched: Sequence[int]
    candidates: Mapping[int, tuple[Pattern, ...]]
    curves: Mapping[int, Mapping[int, Curves]]
    costs: Costs
    heads: Heads
    trials: tuple[Trial, ...]
    gated: Gated
    calibration: Sequence[TokenSequence]
    calibration_sha256: str
    seen: Seen
    gradient_fault: str | None

    @property
    def length(self) -> int:
        return max(self.candidates)

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The candidates of the longest length."""
        return self.candidates[self.length]

    def density(self, tail: int) -> np.ndarray:
        """(L, H, C) tiles computed over those of dense attention."""
        tiles = self.heads.curves[tail].tiles
        dense = next(c for c, pattern in enumerate(self.patterns) if pattern.kind == "dense")
        share: np.ndarray = tiles / tiles[..., dense : dense + 1]
        return share
