"""The share of attention that choices have to hold, for an error or for so many tokens (Twilight, arXiv 2502.02770)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from artifacts import HeadwiseError
from profiling.similarities.budget_meter import Point

GRID = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99)


def least_coverage(points: Sequence[Point], allowed: float) -> Point:
    """Of points by coverage, ascending, the first from which on none has more error than is allowed.

    Raises:
        HeadwiseError: the last has more.
    """
    kept: list[Point] = []
    for point in reversed(points):
        if point.error > allowed:
            break
        kept.append(point)
    if not kept:
        raise HeadwiseError(
            f"--target-error {allowed:g} cannot be met: a coverage of {points[-1].coverage} has an error of "
            f"{points[-1].error:.5f}; allow more, or raise --budget"
        )
    return kept[-1]


def coverage_of(points: Sequence[Point], tokens: float) -> float:
    """The coverage that reads so many tokens on average, between points by coverage, ascending.

    Raises:
        HeadwiseError: none reads so few, or so many.
    """
    reads = [point.tokens for point in points]
    if not reads[0] <= tokens <= reads[-1]:
        raise HeadwiseError(
            f"--target-tokens {tokens:g} cannot be met: coverages from {points[0].coverage} to {points[-1].coverage} "
            f"read {reads[0]:.0f} to {reads[-1]:.0f} tokens; ask for one of these, or raise --budget"
        )
    return float(np.interp(tokens, reads, [point.coverage or 0.0 for point in points]))


def lines_of(points: Sequence[Point]) -> list[str]:
    """A line for each point, on held-out prompts; none without points."""
    if not points:
        return []
    lines = [f"{'on held-out prompts':<27}tokens       error  worst prompt"]
    for point in points:
        what = f"top {point.budget}" if point.coverage is None else f"coverage {point.coverage:g}"
        lines.append(f"  {what:<21}{point.tokens:10.1f}{point.error:12.5f}{point.worst:14.5f}")
    return lines
