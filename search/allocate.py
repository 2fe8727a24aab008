"""Spends a budget over many parts whose costs add up: exact on the curves' lower convex hulls.

With separable costs the best choice for a total is, for some price, each part's cheapest point at that price (Everett
1963, generalised Lagrange multipliers), so it lies on the hulls; walking their steepest steps first goes through them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from artifacts import HeadwiseError


def allocate(costs: np.ndarray, sizes: Sequence[float], total: float) -> list[int]:
    """For each part the place in `sizes` to take, so that the sizes sum to at most `total` and costs to least.

    The result is the best there is for the total that it uses; what is left is less than one more step.

    Args:
        costs: (parts, sizes), each part's cost at each size.
        sizes: ascending.
        total: what all parts may use together.

    Raises:
        HeadwiseError: not even the smallest size fits.
    """
    if len(costs) * sizes[0] > total:
        raise HeadwiseError(
            f"a total of {total:g} is too small for {len(costs)} parts: the least is {len(costs) * sizes[0]:g}"
        )
    hulls = [_hull(sizes, row) for row in costs]
    at = [0] * len(costs)
    left = total - len(costs) * sizes[0]
    steps: list[tuple[float, int]] = []

    def push(part: int) -> None:
        if at[part] + 1 < len(hulls[part]):
            here, there = hulls[part][at[part]], hulls[part][at[part] + 1]
            gain = costs[part][here] - costs[part][there]
            heapq.heappush(steps, (-gain / (sizes[there] - sizes[here]), part))

    for part in range(len(costs)):
        push(part)
    while steps:
        _, part = heapq.heappop(steps)
        size = sizes[hulls[part][at[part] + 1]] - sizes[hulls[part][at[part]]]
        # A part whose step does not fit stays; a later, smaller step of another may.
        if size <= left * (1 + 1e-12):
            left -= size
            at[part] += 1
            push(part)
    return [hull[place] for hull, place in zip(hulls, at, strict=True)]


def _hull(sizes: Sequence[float], costs: np.ndarray) -> list[int]:
    """Places of the lower convex hull from the smallest size on, where more size costs less."""
    hull: list[int] = []
    for place in range(len(sizes)):
        if hull and costs[place] >= costs[hull[-1]]:
            continue
        while len(hull) > 1 and _slope(sizes, costs, hull[-2], hull[-1]) >= _slope(sizes, costs, hull[-1], place):
            hull.pop()
        hull.append(place)
    return hull


def _slope(sizes: Sequence[float], costs: np.ndarray, a: int, b: int) -> float:
    return float((costs[b] - costs[a]) / (sizes[b] - sizes[a]))
