"""Ratios are of pairs, with intervals by order statistics."""

from __future__ import annotations

import pytest
import torch

from artifacts import HeadwiseError
from profiling.speed.baselines import ratio_of_pairs


def test_ratios_are_of_pairs() -> None:
    """A machine that gets slower and slower makes both slower."""
    those = [float(n) for n in range(1, 31)]
    ratio = ratio_of_pairs([1.02 * n for n in those], those)
    assert ratio.low == pytest.approx(1.02) and ratio.high == pytest.approx(1.02)
    generator = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(200):
        noisy = (1.1 * torch.randn(40, generator=generator).mul(0.1).exp()).tolist()
        found = ratio_of_pairs(noisy, [1.0] * 40)
        held += found.low <= 1.1 <= found.high
    assert 180 <= held <= 199
    assert ratio_of_pairs([2.0, 3.0], [1.0, 1.0]).low == 2.0


@pytest.mark.parametrize(
    ("count", "low", "high"), [(6, 1, 6), (8, 1, 8), (9, 2, 8), (20, 6, 15), (40, 14, 27)]
)
def test_bounds_hold_the_median_as_often_as_they_say(count: int, low: int, high: int) -> None:
    """By the table of the sign test: of 8 the second and the seventh would hold it in 93% alone."""
    found = ratio_of_pairs([float(n) for n in range(1, count + 1)], [1.0] * count)
    assert (found.low, found.high) == (low, high)


def test_times_that_make_no_pairs() -> None:
    with pytest.raises(HeadwiseError, match="2 and 1 times cannot be paired"):
        ratio_of_pairs([1.0, 2.0], [1.0])
