"""Spends a budget over many parts whose costs add up: exact on the curves' lower convex hulls.

With separable costs the best choice for a total is, for some price, each part's cheapest point at that price (Everett
1963, generalised Lagrange multipliers), so it lies on the hulls; walking their steepest steps first goes through them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from artifacts import HeadwiseError


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """places: for each part the entry that it got. price: what the last step that was taken saved of costs for a unit
    of size; infinite where all parts have their smallest size."""

    places: list[int]
    price: float


def allocate(costs: np.ndarray, sizes: Sequence[float] | np.ndarray, total: float) -> list[int]:
    """For each part the place in `sizes` to take; see `spend`."""
    return spend(costs, sizes, total).places


def spend(costs: np.ndarray, sizes: Sequence[float] | np.ndarray, total: float) -> Allocation:
    """For each part an entry, so that the sizes sum to at most `total` and costs to least.

    The result is the best there is for the total that it uses; what is left is less than one more step.

    Args:
        costs: (parts, entries), each part's cost with each entry; what is not finite is not taken.
        sizes: (entries,) or, where parts differ, (parts, entries).
        total: what all parts may use together.

    Raises:
        HeadwiseError: not even the smallest sizes fit.
    """
    wide = np.broadcast_to(np.asarray(sizes, dtype=np.float64), costs.shape)
    hulls = [_hull(size, cost) for size, cost in zip(wide, costs, strict=True)]
    least = float(sum(size[hull[0]] for size, hull in zip(wide, hulls, strict=True)))
    if least > total * (1 + 1e-12):
        raise HeadwiseError(f"a total of {total:g} is too small for {len(costs)} parts: the least is {least:g}")
    at = [0] * len(costs)
    left = total - least
    price = float("inf")
    steps: list[tuple[float, int]] = []

    def push(part: int) -> None:
        if at[part] + 1 < len(hulls[part]):
            here, there = hulls[part][at[part]], hulls[part][at[part] + 1]
            heapq.heappush(steps, (_slope(wide[part], costs[part], here, there), part))

    for part in range(len(costs)):
        push(part)
    while steps:
        slope, part = heapq.heappop(steps)
        size = wide[part][hulls[part][at[part] + 1]] - wide[part][hulls[part][at[part]]]
        # A part whose step does not fit stays; a later, smaller step of another may.
        if size <= left * (1 + 1e-12):
            left -= size
            at[part] += 1
            price = -slope
            push(part)
    return Allocation(places=[hull[place] for hull, place in zip(hulls, at, strict=True)], price=price)


def _hull(sizes: np.ndarray, costs: np.ndarray) -> list[int]:
    """Places on the lower convex hull from the smallest size on, also amid its edges, where more size costs less."""
    hull: list[int] = []
    # Of entries that are alike the last: where candidates ascend, dense before what only happens to be exact.
    for place in np.lexsort((-np.arange(len(sizes)), costs, sizes)).tolist():
        if not np.isfinite(costs[place]) or (hull and costs[place] >= costs[hull[-1]]):
            continue
        while len(hull) > 1 and _slope(sizes, costs, hull[-2], hull[-1]) > _slope(sizes, costs, hull[-1], place):
            hull.pop()
        hull.append(place)
    return hull


def _slope(sizes: np.ndarray, costs: np.ndarray, a: int, b: int) -> float:
    return float((costs[b] - costs[a]) / max(sizes[b] - sizes[a], 1e-300))
