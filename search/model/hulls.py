"""Spends a budget over many parts whose losses add up: exact on the curves' lower convex hulls.

With separable losses the best choice for a total is, for some price, each part's entry with the
least loss and price times cost (Everett 1963, generalised Lagrange multipliers), so it lies on the
hulls; walking their steepest steps first goes through them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from artifacts import HeadwiseError

_ROUNDING = 1e-12


def spend(
    losses: np.ndarray, costs: Sequence[float] | np.ndarray, total: float
) -> tuple[list[int], float]:
    """Choose an entry for each part: costs sum to at most `total`, and losses to the least.

    Up to the first step that does not fit, the choice is the best at its cost. Flatter steps
    that still fit are then taken, the steepest first, until none is left that fits.

    Args:
        losses: (parts, entries), each part's loss with each entry; one that is not finite is never
            taken.
        costs: (entries,) or, where parts differ, (parts, entries).
        total: what all parts may cost together.

    Returns:
        The entry of each part, and their price, the Lagrange multiplier: loss that a unit of cost
        has to save to be spent, the slope of the first step that did not fit. At this price each
        part's best entry is the one it got, or, where a later and flatter step still fitted, one
        that costs less. 0 where every part has its best entry.

    Raises:
        HeadwiseError: not even the cheapest entries fit.
    """
    wide = np.broadcast_to(np.asarray(costs, dtype=np.float64), losses.shape)
    hulls = [hull(cost, loss) for cost, loss in zip(wide, losses, strict=True)]
    cheapest = float(sum(cost[line[0]] for cost, line in zip(wide, hulls, strict=True)))
    if cheapest > total * (1 + _ROUNDING):
        raise HeadwiseError(
            f"a total of {total:g} is too small for {len(losses)} parts: the least is {cheapest:g}"
        )
    at = [0] * len(losses)
    left = total - cheapest
    price = 0.0
    steps: list[tuple[float, int]] = []

    def push(part: int) -> None:
        if at[part] + 1 < len(hulls[part]):
            here = hulls[part][at[part]]
            there = hulls[part][at[part] + 1]
            heapq.heappush(steps, (-slope(wide[part], losses[part], here, there), part))

    for part in range(len(losses)):
        push(part)
    while steps:
        steepness, part = heapq.heappop(steps)
        step = wide[part][hulls[part][at[part] + 1]] - wide[part][hulls[part][at[part]]]
        # A part whose step does not fit stays; a later, smaller step of another may fit.
        if step <= left + _ROUNDING * total:
            left -= step
            at[part] += 1
            push(part)
        elif not price:
            price = -steepness
    return [line[step] for line, step in zip(hulls, at, strict=True)], price


def hull(costs: Sequence[float] | np.ndarray, losses: Sequence[float] | np.ndarray) -> list[int]:
    """Entries on the lower convex hull, the cheapest first; each loses less than those before.

    Those amid an edge belong to it, also where rounding puts them above: they are smaller steps at
    the same price.
    """
    line: list[int] = []
    costs = np.asarray(costs, dtype=np.float64)
    losses = np.asarray(losses, dtype=np.float64)
    # Of entries that are alike the last: where candidates ascend, dense before what only happens to
    # be exact.
    for entry in np.lexsort((-np.arange(len(costs)), losses, costs)).tolist():
        if not np.isfinite(losses[entry]) or (line and losses[entry] >= losses[line[-1]]):
            continue
        while len(line) > 1 and _above(costs, losses, line[-2], line[-1], entry):
            line.pop()
        line.append(entry)
    return line


def _above(costs: np.ndarray, losses: np.ndarray, cheaper: int, amid: int, dearer: int) -> bool:
    """True if an entry lies above the line between two others, by more than rounding."""
    edge = slope(costs, losses, cheaper, dearer)
    on_it = losses[cheaper] - edge * (costs[amid] - costs[cheaper])
    rounding = _ROUNDING * (abs(losses[cheaper]) + abs(losses[dearer]) + edge * abs(costs[dearer]))
    return bool(losses[amid] > on_it + rounding)


def slope(costs: np.ndarray, losses: np.ndarray, cheaper: int, dearer: int) -> float:
    """Loss that a unit of cost saves from one entry to another."""
    return float((losses[cheaper] - losses[dearer]) / max(costs[dearer] - costs[cheaper], 1e-300))
