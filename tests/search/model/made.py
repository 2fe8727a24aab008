"""Curves and costs that a test writes down or draws, and a run without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from profiling.ranks import Ranks
from search.model.allocation import Allocation, CostCurves
from search.model.curves import Curves
from search.model.losses import ContextLoss

LAYERS = 3


@dataclass
class FormulaRun:
    """A run without a model: losses are a formula of the reference, the allocation and the numbers.

    A set of prompts is its own reference.

    Attributes:
        measured: every (reference, allocation, numbers).
        trials: every (allocation, losses, name of the prompts).
    """

    formula: Callable[[Any, Allocation, Any], Sequence[ContextLoss]]
    heads: CostCurves
    allocation: Allocation | None = None
    rounds: list[Any] = field(default_factory=list)
    ranks: Ranks = field(default_factory=Ranks)
    measured: list[tuple[Any, Allocation, Any]] = field(default_factory=list)
    trials: list[tuple[Allocation, Any, str]] = field(default_factory=list)

    def reference(self, prompts: Any) -> Any:
        return prompts

    def measure(
        self,
        reference: Any,
        allocations: Sequence[Allocation],
        numbers: Any = None,
        *,
        name: str = "",
    ) -> list[tuple[ContextLoss, ...]]:
        results = []
        for allocation in allocations:
            self.measured.append((reference, allocation, numbers))
            results.append(tuple(self.formula(reference, allocation, numbers)))
        return results

    def add_trial(self, *trial: Any) -> None:
        self.trials.append(trial)


def curves_of(change: np.ndarray, **changes: Any) -> Curves:
    """Without gradients: heads are weighed by their change."""
    zero = np.where(np.isnan(change), np.nan, 0.0)
    zeros = dict.fromkeys(("recall", "tiles", "text_fisher", "first_order", "answer_fisher"), zero)
    counts = dict.fromkeys(("text_tokens", "texts", "asked"), 0)
    return Curves(change=change, **{"error": change, **zeros, **counts, **changes})


def heads_of(
    seed: int,
    *,
    heads: int = 2,
    candidates: int = 4,
    tails: tuple[int, ...] = (64,),
    dense: bool = False,
) -> CostCurves:
    """Layer 1 is left alone; more cost is less change, and error goes its own way.

    With `dense` the last candidate of each head costs as much as everything, and loses nothing.
    """
    curves = {}
    costs = {}
    for tail in tails:
        rng = np.random.default_rng([seed, tail])
        shape = (LAYERS, heads, candidates)
        cost = np.sort(rng.exponential(size=shape), axis=-1) + 0.1
        change = -np.sort(
            -rng.exponential(size=shape) * rng.exponential(size=shape[:2])[..., None], axis=-1
        )
        if dense:
            cost[..., -1] = cost.max()
            change[..., -1] = 0.0
        error = rng.exponential(size=shape)
        text, answer = (change * rng.lognormal(sigma=0.5, size=shape) for _ in range(2))
        for values in (cost, change, error, text, answer):
            values[1] = np.nan
        fisher = {"text_fisher": text, "answer_fisher": answer}
        curves[tail] = curves_of(change, error=error, **fisher, texts=1, asked=1)
        costs[tail] = cost
    return CostCurves(
        curves=curves, costs=costs, all_keys=float(np.nanmax([*costs.values()])), unit="flops"
    )
