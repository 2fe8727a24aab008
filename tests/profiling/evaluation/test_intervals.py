"""Intervals against values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from artifacts import HeadwiseError
from profiling.evaluation.intervals import (
    holm,
    mean_interval,
    paired_difference,
    prompts_needed,
    share_of,
    sign_flip,
    student,
    wilson,
)

Z = 1.959963984540054


def test_wilson_equals_its_formula():
    result = wilson(8, 10)
    middle = (0.8 + Z**2 / 20) / (1 + Z**2 / 10)
    half = Z / (1 + Z**2 / 10) * math.sqrt(0.8 * 0.2 / 10 + Z**2 / 400)
    assert (result.value, result.count) == (0.8, 10)
    assert (result.low, result.high) == pytest.approx((middle - half, middle + half))
    assert (result.low, result.high) == pytest.approx((0.490, 0.943), abs=5e-4)


@pytest.mark.parametrize("count, quantile", [(2, 12.706), (4, 3.182), (8, 2.365), (31, 2.042)])
def test_student_equals_the_t_table(count, quantile):
    values = np.random.default_rng(0).standard_normal(count).tolist()
    middle, half = np.mean(values), quantile * np.std(values, ddof=1) / count**0.5
    result = student(values)
    assert result.value == pytest.approx(middle)
    assert (result.low, result.high) == pytest.approx((middle - half, middle + half), rel=2e-3)


def test_wilson_of_all_or_none_has_a_width():
    assert wilson(20, 20).low == pytest.approx(1 / (1 + Z**2 / 20)) and wilson(20, 20).high == 1
    assert wilson(0, 20).low == 0 and wilson(0, 20).high == pytest.approx(1 - wilson(20, 20).low)
    assert wilson(20, 20).low < wilson(40, 40).low < 1
    assert wilson(5, 10, confidence=0.5).high < wilson(5, 10).high


def test_share_of_equals_a_hand_computed_ratio():
    # 1 of 2 and 1 of 4 are a third of all: residuals of 1/3, of which 2/3 and 1/3 are left. These
    # units are worth 36 / 20 equal ones: one degree of freedom, the least.
    half = 12.7062 * math.sqrt((1 / 9) / (2 / 3) + (1 / 9) / (1 / 3)) / 6
    result = share_of([1, 1], [2, 4])
    expected = (1 / 3, 1 / 3 - half, 1 / 3 + half)
    assert (result.value, result.low, result.high) == pytest.approx(expected, rel=1e-4)
    assert share_of([1], [4]) == student([0.25])


def test_share_of_units_of_equal_sizes_is_students():
    result, expected = share_of([1, 2, 6], [4, 4, 4]), student([0.25, 0.5, 1.5])
    assert (result.value, result.low, result.high) == pytest.approx(
        (expected.value, expected.low, expected.high)
    )


@pytest.mark.parametrize("sizes", [(0, 0, 0, 5), (0, 0, 0, 0), (1e-9, 0, 0, 5)])
def test_share_of_where_one_unit_has_all_of_the_sizes_has_no_interval(sizes):
    """A unit without correct answers may have answers that are won."""
    for values in ((-1, 0, 0, 0), (0, 0, 0, 0)):
        result = share_of(values, sizes)
        assert result.value == pytest.approx(sum(values) / max(1, sum(sizes)))
        assert (result.low, result.high, result.count) == (-math.inf, math.inf, 4)
        assert not result.is_known
    two = share_of((-1, 0, 0, 0), (0, 0, 1, 4))
    # Residuals of -1, 0.2 and 0.8, of which all, 0.8 and 0.2 are left; one degree of freedom.
    half = 12.7062 * math.sqrt(1 + 0.2**2 / 0.8 + 0.8**2 / 0.2) / 5
    assert two.is_known and two.high == pytest.approx(-0.2 + half, rel=1e-4)


def test_share_of_holds_the_rate_where_one_unit_has_most_of_the_answers():
    rng = np.random.default_rng(0)
    sizes = [300, 50, 30, 20]
    # Rates differ from unit to unit, as those of contexts do.
    rates = rng.beta(1, 9, (400, 4))
    holds = [share_of(rng.binomial(sizes, each).tolist(), sizes).holds(0.1) for each in rates]
    assert np.mean(holds) > 0.9


def test_mean_interval_stays_between_0_and_1():
    assert mean_interval([1, 0, 1.0, True]) == wilson(3, 4)
    scores = [0.5, 0, 1, 1]
    assert (mean_interval(scores).low, mean_interval(scores).high) == (0, 1)
    assert student(scores).low < 0 and student(scores).high > 1
    assert mean_interval([0.4, 0.5, 0.6]) == student([0.4, 0.5, 0.6])
    assert student([0.7]) == mean_interval([0.7])
    assert student([0.7]).low == student([0.7]).high == 0.7


def test_paired_difference_equals_newcombes_formula():
    # 7 both right, 3 only the first, 1 only the second, 9 neither.
    a = [1] * 7 + [1] * 3 + [0] * 1 + [0] * 9
    b = [1] * 7 + [0] * 3 + [1] * 1 + [0] * 9
    result = paired_difference(a, b)
    one, two = wilson(10, 20), wilson(8, 20)
    phi = (7 * 9 - 3 * 1 - 20 / 2) / math.sqrt(10 * 10 * 8 * 12)
    down, up = 0.5 - one.low, two.high - 0.4
    low = 0.1 - math.sqrt(down**2 - 2 * phi * down * up + up**2)
    down, up = one.high - 0.5, 0.4 - two.low
    high = 0.1 + math.sqrt(down**2 - 2 * phi * down * up + up**2)
    assert (result.value, result.low, result.high) == pytest.approx((0.1, low, high))
    other = paired_difference(b, a)
    assert (other.value, other.low, other.high) == pytest.approx((-0.1, -high, -low))


def test_intervals_refuse_wrong_arguments():
    for scores in ([], [float("nan")], [1, float("inf")]):
        with pytest.raises(HeadwiseError, match="finite"):
            mean_interval(scores)
    with pytest.raises(HeadwiseError, match="3 right of 2"):
        wilson(3, 2)
    with pytest.raises(HeadwiseError, match="2 and 3"):
        paired_difference([1, 0], [1, 0, 1])
    with pytest.raises(HeadwiseError, match=r"confidence .* 95"):
        wilson(1, 2, confidence=95)


def test_sign_flip_equals_exact_counts():
    # Of the 8 ways to sign 1, 2 and 4 two have a sum as far from 0 as 7, and four one as far as 5:
    # 7, 5 (-1), and less.
    assert sign_flip([1, 2, 4]) == 2 / 8
    assert sign_flip([-1, 2, 4]) == 4 / 8
    assert sign_flip([0, 0]) == 1 and sign_flip([0, 3]) == 1
    # Right and wrong answers: 9 against 1 of 10 that differ is McNemar's exact test, 2 (1 + 10) /
    # 2^10.
    assert sign_flip([1] * 9 + [-1] + [0] * 30) == pytest.approx(22 / 1024)
    # With sampled signs: near the exact count, and never 0.
    some = np.random.default_rng(3).normal(0.5, 1, 13).tolist()
    counted = sign_flip(some, resamples=1 << 13)
    assert sign_flip(some, resamples=9000) == pytest.approx(counted, abs=0.02)
    assert sign_flip([1.0] * 60, resamples=999) == 1 / 1000


def test_holm_equals_a_hand_computed_correction():
    # Sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1: 0.02, 0.03, 0.06, and the last no less than
    # the one before.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == [] and holm([0.2]) == [0.2] and holm([0.9, 0.8]) == [1, 1]


def test_prompts_needed_equals_the_power_formula():
    # A spread of 1: (1.96 + 0.8416)^2 = 7.849 over 0.05^2.
    assert prompts_needed([-1, 0, 1]) == math.ceil(7.84888 / 0.0025)
    assert prompts_needed([0.1, 0.1, 0.1]) == 6
    with pytest.raises(HeadwiseError, match="at least 2 prompts"):
        prompts_needed([0.1])
