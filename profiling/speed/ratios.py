"""Ratios of times that were measured in pairs: their median, and an interval that takes no distribution for granted."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from artifacts import HeadwiseError


@dataclass(frozen=True)
class Ratio:
    """A median of ratios, and the bounds that hold the true median in 95 of 100 measurements."""

    value: float
    low: float
    high: float


def ratio_of_pairs(these: Sequence[float], those: Sequence[float]) -> Ratio:
    """How many times as long these took, pair by pair; bounds by order statistics (the sign test turned round).

    Raises:
        HeadwiseError: none, or not as many of the one as of the other.
    """
    if not these or len(these) != len(those):
        raise HeadwiseError(f"{len(these)} and {len(those)} times cannot be paired: give as many of both, at least 1")
    ratios = sorted(a / b for a, b in zip(these, those, strict=True))
    count = len(ratios)
    # The normal approximation of the binomial; with fewer than 6 pairs the bounds are the smallest and the largest.
    rank = max(int((count - 1.96 * sqrt(count)) / 2), 0)
    return Ratio(statistics.median(ratios), ratios[rank], ratios[count - 1 - rank])
