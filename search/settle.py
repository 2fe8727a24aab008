"""From curves to patterns: what each head gets for a budget.

Shapes: L layers, H query heads, C candidates.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from artifacts import Pattern as ArtifactPattern
from artifacts import pattern_name
from kernels.patterns import Pattern
from search.allocate import spend
from search.curves import Curves
from search.record import as_artifact_pattern


@dataclass(frozen=True, kw_only=True, eq=False)
class Settlement:
    """chosen: (L, H) candidate, -1 in layers left alone. weight: (L,) of the layers' losses.

    cost: of all heads together. price: loss that the dearest step taken saved for a unit of cost; None where heads
    had budgets of their own.
    """

    chosen: np.ndarray
    cost: float
    weight: np.ndarray
    price: float | None

    def pick(self, values: np.ndarray) -> np.ndarray:
        """(L, H) of (L, H, C): each head's with what it got, NaN in layers left alone."""
        taken = np.take_along_axis(values, np.maximum(self.chosen, 0)[..., None], axis=-1)[..., 0]
        found: np.ndarray = np.where(self.chosen < 0, np.nan, taken)
        return found


def by_model(
    curves: Curves, costs: np.ndarray, total: float, *, weight: np.ndarray, allowed: np.ndarray | None = None
) -> Settlement:
    """One budget for the model: the least weighted loss for at most `total` (search.allocate).

    Args:
        curves: of the prompts.
        costs: (L, H, C).
        total: what all heads may cost together.
        weight: (L,) of each layer's loss.
        allowed: (C,) candidates that may be taken; all if None.

    Raises:
        HeadwiseError: the total is less than all heads' cheapest candidates.
    """
    layers = np.flatnonzero(curves.searched)
    loss = curves.loss[layers] * weight[layers, None, None]
    if allowed is not None:
        loss = np.where(allowed, loss, np.inf)
    flat = loss.reshape(-1, loss.shape[-1])
    spent = spend(flat, costs[layers].reshape(flat.shape), total)
    chosen = np.full(curves.change.shape[:2], -1, dtype=np.int64)
    chosen[layers] = np.array(spent.places).reshape(loss.shape[:2])
    return _settlement(chosen, costs, weight, spent.price)


def by_head(curves: Curves, costs: np.ndarray, total: float) -> Settlement:
    """The same budget for every head, as in MInference 1.0, Algorithm 1: of what keeps to it the least error.

    The budget is the largest with which all heads together cost at most `total`; a head that has nothing within it
    takes its cheapest candidate.
    """
    layers = np.flatnonzero(curves.searched)
    own, error = costs[layers], curves.error[layers]
    cheapest = own.min(axis=-1, keepdims=True)

    def chosen_for(each: float) -> np.ndarray:
        within = (own <= each) | (own <= cheapest)
        places: np.ndarray = np.where(within, error, np.inf).argmin(axis=-1)
        return places

    def total_of(places: np.ndarray) -> float:
        return float(np.take_along_axis(own, places[..., None], axis=-1).sum())

    # With more, heads only change to dearer candidates: what all cost together never falls.
    budgets = np.unique(own)
    fits = bisect_right(budgets, total * (1 + 1e-9), key=lambda each: total_of(chosen_for(float(each))))
    chosen = np.full(curves.change.shape[:2], -1, dtype=np.int64)
    chosen[layers] = chosen_for(float(budgets[max(fits - 1, 0)]))
    return _settlement(chosen, costs, np.ones(len(chosen)), None)


def _settlement(chosen: np.ndarray, costs: np.ndarray, weight: np.ndarray, price: float | None) -> Settlement:
    found = Settlement(chosen=chosen, cost=0.0, weight=weight, price=price)
    return Settlement(chosen=chosen, cost=float(np.nansum(found.pick(costs))), weight=weight, price=price)


def rows_of(
    settlement: Settlement, candidates: Sequence[Pattern]
) -> tuple[tuple[tuple[str, ...] | None, ...], dict[str, ArtifactPattern]]:
    """An artifact's rows of pattern names, None for a layer left alone, and the patterns that they name."""
    rows: list[tuple[str, ...] | None] = []
    patterns: dict[str, ArtifactPattern] = {}
    for layer in settlement.chosen:
        if layer[0] < 0:
            rows.append(None)
            continue
        named = [as_artifact_pattern(candidates[c]) for c in layer]
        patterns.update({pattern_name(pattern): pattern for pattern in named})
        rows.append(tuple(pattern_name(pattern) for pattern in named))
    return tuple(rows), patterns
