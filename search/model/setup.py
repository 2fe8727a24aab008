"""What all phases of a search with one budget for the model share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from artifacts import ModelInfo
from kernels.patterns import LayerPlan, Pattern
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel
from profiling.prompts.held_out import Seen
from profiling.prompts.prompt import Prompt
from profiling.ranks import Ranks
from search.model.allocation import Allocation
from search.model.config import ModelSearch


@dataclass(frozen=True, kw_only=True, eq=False)
class Setup:
    """A search as one rank runs it.

    searched: the layers that get patterns. prompts: to calibrate on, and candidates, by length. seen: what calibration
    and held-out prompts have looked at.
    """

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
        return self.config.tails(self.length)

    def plans(self, allocation: Allocation) -> dict[int, LayerPlan]:
        """What serves an allocation, by layer."""
        return allocation.plans(self.patterns, self.model.num_kv_heads)
