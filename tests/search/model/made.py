"""Curves and costs that a test writes down or draws."""

from __future__ import annotations

from typing import Any

import numpy as np

from search.model.allocation import Heads
from search.model.curves import Curves

LAYERS = 3


def curves_of(change: np.ndarray, **changes: Any) -> Curves:
    """Without gradients: heads are weighed by their change."""
    zero = np.where(np.isnan(change), np.nan, 0.0)
    known = {"error": change, "recall": zero, "tiles": zero, "text": zero, "drop": zero, "answer": zero}
    return Curves(change=change, **known | {"tokens": 0, "texts": 0, "asked": 0} | changes)


def heads_of(
    seed: int, *, ranks: int = 1, heads: int = 2, candidates: int = 4, tails: tuple[int, ...] = (64,)
) -> Heads:
    """Layer 1 is left alone; more cost is less change, and error goes its own way."""
    curves, costs = {}, {}
    for tail in tails:
        rng = np.random.default_rng([seed, tail])
        shape = (LAYERS, heads, candidates)
        cost = np.sort(rng.exponential(size=shape), axis=-1) + 0.1
        change = -np.sort(-rng.exponential(size=shape) * rng.exponential(size=shape[:2])[..., None], axis=-1)
        error = rng.exponential(size=shape)
        text, answer = (change * rng.lognormal(sigma=0.5, size=shape) for _ in range(2))
        for values in (cost, change, error, text, answer):
            values[1] = np.nan
        curves[tail] = curves_of(change, error=error, text=text, answer=answer, texts=1, asked=1)
        costs[tail] = cost
    return Heads(curves=curves, costs=costs, all_keys=float(np.nanmax([*costs.values()])), ranks=ranks)
