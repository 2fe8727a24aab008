"""What all phases of a search with one budget for the model share, and what it found, before it is
written.

Shapes: L layers, H query heads, C candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from artifacts import ModelInfo
from kernels.patterns import LayerPlan, Pattern
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel
from profiling.prompts.held_out import Seen
from profiling.prompts.prompt import Prompt
from profiling.quality.sequences import TokenSequence
from profiling.ranks import Ranks
from search.model.allocation import Allocation, Heads
from search.model.config import ModelSearch
from search.model.costs import Costs
from search.model.curves import Curves
from search.model.gate import Gated
from search.model.refine import Trial


@dataclass(frozen=True, kw_only=True, eq=False)
class Setup:
    """A search as one rank runs it.

    searched: the layers that get patterns. prompts: to calibrate on, and candidates, by length.
    seen: what calibration and held-out prompts have looked at."""

    config: ModelSearch
    loaded: LoadedModel
    model: ModelInfo
    launch: Ranks
    ledger: Ledger
    searched: tuple[int, ...]
    prompts: Mapping[int, list[Prompt]]
    seen: Seen
    backend: str
    candidates: Mapping[int, tuple[Pattern, ...]]

    @property
    def length(self) -> int:
        """The longest, which patterns are for."""
        return max(self.candidates)

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The candidates of the longest length."""
        return self.candidates[self.length]

    @property
    def tails(self) -> tuple[int, ...]:
        """Dense tails that are compared."""
        return self.config.tails

    def plans(self, allocation: Allocation) -> dict[int, LayerPlan]:
        """What serves an allocation, by layer."""
        return allocation.plans(self.patterns, self.model.num_kv_heads)


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What a search found.

    budget: the share of all of attention that could be spent. least: why that is more than was
    asked for, None where it is not. curves: by length and tail."""

    setup: Setup
    budget: float
    least: str | None
    curves: Mapping[int, Mapping[int, Curves]]
    costs: Costs
    heads: Heads
    trials: tuple[Trial, ...]
    gated: Gated
    calibration: Sequence[TokenSequence]
    gradient_fault: str | None

    @property
    def spent(self) -> float:
        """What was spent, as a share of what computing everything costs."""
        return self.gated.chosen.allocation.cost / self.heads.total(1.0)

    @property
    def raised(self) -> str | None:
        """Why more was spent than was asked for; None where it was not."""
        return "; ".join(filter(None, (self.least, self.gated.fault))) or None

    def density(self, tail: int) -> np.ndarray:
        """(L, H, C) tiles computed over those of dense attention."""
        tiles = self.heads.curves[tail].tiles
        dense = next(c for c, pattern in enumerate(self.setup.patterns) if pattern.kind == "dense")
        share: np.ndarray = tiles / tiles[..., dense : dense + 1]
        return share
