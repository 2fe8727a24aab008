"""Ratios of times that were measured in pairs: their median, and an interval that takes no
distribution for granted."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

from artifacts import HeadwiseError

# Pairs of which the smallest and the largest ratio hold the median in 95 of 100 measurements: 1 -
# 2^(1 - n).
LEAST = 6


@dataclass(frozen=True)
class Ratio:
    """A median of ratios, and bounds that hold the true median in at least 95 of 100 measurements.

    Of fewer than LEAST pairs no bounds do: they are the smallest and the largest ratio.
    """

    value: float
    low: float
    high: float


def ratio_of_pairs(these: Sequence[float], those: Sequence[float]) -> Ratio:
    """How many times as long these took, pair by pair; bounds by order statistics (the sign test
    turned round).

    Raises:
        HeadwiseError: none, or not as many of the one as of the other.
    """
    if not these or len(these) != len(those):
        raise HeadwiseError(
            f"{len(these)} and {len(those)} times cannot be paired: give as many of both, at least "
            f"1"
        )
    ratios = sorted(a / b for a, b in zip(these, those, strict=True))
    count = len(ratios)
    rank = 0
    # The true median is below the r-th smallest of n where fewer than r are below it: a binomial's
    # tail, on both sides.
    while 2 * sum(comb(count, few) for few in range(rank + 2)) <= 0.05 * 2**count:
        rank += 1
    return Ratio(statistics.median(ratios), ratios[rank], ratios[count - 1 - rank])
