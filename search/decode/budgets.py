"""KV budgets of heads: the sections that spend a total by measured curves, and evenly."""

from __future__ import annotations

from typing import Any

import numpy as np

from artifacts import H2O, Full, HeadwiseError, KVCache
from artifacts.schema.kv_cache import Policy
from profiling.caches.budget_curves import BudgetCurves
from search.model.hulls import spend


def by_error(curves: BudgetCurves, share: float, normalised: bool = True) -> tuple[KVCache, float]:
    """The section of least error at a fraction of all tokens, and the fraction that it uses.

    Raises:
        HeadwiseError: the smallest budgets need more.
    """
    layers = curves.layers
    sizes = (*curves.shares, 1.0)
    costs = np.concatenate(
        [curves.error[layers], np.zeros((len(layers), curves.error.shape[1], 1))], axis=-1
    )
    costs = costs.reshape(-1, len(sizes))
    if share < sizes[0]:
        raise HeadwiseError(
            f"--target-share must be at least the smallest measured budget, {sizes[0]:.4f}, "
            f"got {share:.4f}"
        )
    at, _ = spend(costs, sizes, share * len(costs))
    names = [_name(sizes[entry]) for entry in at]
    policies: dict[str, Policy] = {
        _name(size): _policy(size, normalised) for size in sizes if _name(size) in names
    }
    heads = curves.error.shape[1]
    rows: list[Any] = [None] * len(curves.error)
    for i, layer in enumerate(layers):
        row = tuple(names[i * heads : (i + 1) * heads])
        rows[layer] = row
        if len(set(row)) == 1:
            rows[layer] = row[0]
    used = sum(sizes[entry] for entry in at) / len(at)
    return KVCache(policies=policies, layers=tuple(rows)), used


def even_section(curves: BudgetCurves, share: float, normalised: bool = True) -> KVCache:
    """The same share for every head."""
    rows = tuple("even" if layer in curves.layers else None for layer in range(len(curves.error)))
    return KVCache(policies={"even": _policy(share, normalised)}, layers=rows)


def _policy(share: float, normalised: bool) -> Full | H2O:
    if share >= 1:
        return Full()
    return H2O(heavy=share / 2, recent=share / 2, normalised=normalised)


def _name(share: float) -> str:
    if share >= 1:
        return "full"
    return f"h2o_{share:.4g}"
