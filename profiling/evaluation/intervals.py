"""Confidence intervals of means over units, and whether two methods differ by more than chance.

A unit is sampled independently: a prompt, a window of a text, or a context with all its answers.
Resampling few units yields intervals that are too narrow: with 4 normal samples, a 95% percentile
interval contains the mean in 82% of cases. All means therefore use Student's interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist

import numpy as np

from artifacts import HeadwiseError

CONFIDENCE = 0.95
# Random assignments of signs, where counting them all takes too long.
RESAMPLES = 100_000
# Assignments evaluated at once.
_BLOCK = 10_000
# Fraction of all sizes that the largest unit leaves to the others, at least: without others nothing
# shows how a ratio varies.
_LEAST_LEFT = 1e-3


@dataclass(frozen=True)
class Interval:
    """An estimate from `count` prompts, with bounds at the confidence asked for."""

    value: float
    low: float
    high: float
    count: int

    @property
    def is_known(self) -> bool:
        """False where there is no interval: one unit's bounds are its value, others infinite."""
        return math.isfinite(self.high - self.low) and (self.count > 1 or self.low < self.high)

    def holds(self, value: float) -> bool:
        """True if the value is within the bounds, these included."""
        return self.low <= value <= self.high


def wilson(right: int, count: int, *, confidence: float = CONFIDENCE) -> Interval:
    """Compute Wilson's score interval (1927) of an accuracy; sound for few, none or all right."""
    if not 0 <= right <= count or count < 1:
        raise HeadwiseError(
            f"{right} right of {count}: give at least 1 prompt and at most as many right ones"
        )
    z = _z(confidence)
    share = right / count
    spread = z * z / count
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    # With none or all right, the outer bound is exactly 0 or 1, without rounding error.
    if right == 0:
        low = 0.0
    else:
        low = middle - half
    if right == count:
        high = 1.0
    else:
        high = middle + half
    return Interval(share, low, high, count)


def student(values: Sequence[float], *, confidence: float = CONFIDENCE) -> Interval:
    """Compute Student's t interval (1908) of a mean; of one value, the value alone."""
    numbers = _checked(values)
    value = float(numbers.mean())
    count = len(numbers)
    if count == 1:
        return Interval(value, value, value, count)
    half = _quantile(count - 1, confidence) * float(numbers.std(ddof=1)) / math.sqrt(count)
    return Interval(value, value - half, value + half, count)


def share_of(
    values: Sequence[float], sizes: Sequence[float], *, confidence: float = CONFIDENCE
) -> Interval:
    """The sum of values over the sum of sizes, with Student's interval for unequal sizes.

    A residual is divided by the part of its variance that the ratio leaves (HC2 of MacKinnon and
    White 1985), and the degrees of freedom are those of as many units of equal size as estimate the
    ratio as well (Kish 1965). For equal sizes this is Student's interval of the units' ratios.
    Where one unit has more than 99.9% of the sizes, or none has any, the bounds are infinite.

    Args:
        values: of each unit, such as answers lost of a context.
        sizes: of each unit, such as answers in all of a context, from 0 on.
        confidence: of the interval, such as 0.95.
    """
    numbers = _checked(values)
    weights = _checked(sizes)
    count = len(numbers)
    size = float(weights.sum())
    total = max(1.0, size)
    ratio = float(numbers.sum()) / total
    if count == 1:
        return Interval(ratio, ratio, ratio, count)
    if size - float(weights.max()) <= _LEAST_LEFT * size:
        return Interval(ratio, -math.inf, math.inf, count)
    left = 1 - weights / total
    error = math.sqrt(float(((numbers - ratio * weights) ** 2 / left).sum())) / total
    equal = total**2 / max(float((weights**2).sum()), 1.0)
    half = _quantile(max(1.0, min(equal, count) - 1), confidence) * error
    return Interval(ratio, ratio - half, ratio + half, count)


def mean_interval(values: Sequence[float], *, confidence: float = CONFIDENCE) -> Interval:
    """Compute the interval of scores: Wilson's where all are 0 or 1, else Student's."""
    scores = _checked(values)
    if np.isin(scores, (0, 1)).all():
        return wilson(int(scores.sum()), len(scores), confidence=confidence)
    interval = student(values, confidence=confidence)
    return replace(interval, low=max(interval.low, 0.0), high=min(interval.high, 1.0))


def paired_difference(
    a: Sequence[float], b: Sequence[float], *, confidence: float = CONFIDENCE
) -> Interval:
    """The interval of the mean of a - b over the same units.

    Where every score is 0 or 1, Newcombe's (1998, Statistics in Medicine 17:2635, method 10), which
    is sound for few prompts and where none or all are right; elsewhere Student's over pairs.
    """
    first = _checked(a)
    second = _checked(b)
    if len(first) != len(second):
        raise HeadwiseError(f"scores of {len(first)} and {len(second)} prompts cannot be paired")
    if np.isin(first, (0, 1)).all() and np.isin(second, (0, 1)).all():
        return _newcombe(first.astype(bool), second.astype(bool), confidence)
    return student((first - second).tolist(), confidence=confidence)


def sign_flip(differences: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0) -> float:
    """Compute the p-value of a mean paired difference (Fisher's randomisation test).

    Every assignment of signs where there are at most `resamples`, which for right and wrong answers
    is McNemar's exact test; that many random ones, and the one that was found, elsewhere.
    """
    nonzero = _checked(differences)
    nonzero = nonzero[nonzero != 0]
    count = len(nonzero)
    if not count:
        return 1.0
    exact = count < 63 and 1 << count <= resamples
    rng = np.random.default_rng(seed)
    if exact:
        total = 1 << count
    else:
        total = resamples
    far = 0
    # Sums in another order must not be farther than they are.
    threshold = abs(nonzero.sum()) * (1 - 1e-9)
    for start in range(0, total, _BLOCK):
        numbers = np.arange(start, min(start + _BLOCK, total))
        if exact:
            signs = 1 - 2 * ((numbers[:, None] >> np.arange(count)) & 1)
        else:
            signs = 1 - 2 * rng.integers(0, 2, size=(len(numbers), count), dtype=np.int8)
        far += int((np.abs(signs @ nonzero) >= threshold).sum())
    if exact:
        return far / total
    return (far + 1) / (total + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values after Holm (1979): below 0.05, none errs in 95% of such tables."""
    corrected = [1.0] * len(p_values)
    highest = 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[at]))
        corrected[at] = highest
    return corrected


def prompts_needed(differences: Sequence[float], loss: float = 0.05, *, power: float = 0.8) -> int:
    """Compute the prompts that tell a mean loss at 95%, by the spread of paired differences.

    ((z(0.975) + z(power)) * spread / loss)^2, and at least the 6 below which chance alone favours
    one side in all.
    """
    if len(differences) > 1:
        spread = float(_checked(differences).std(ddof=1))
    else:
        spread = math.nan
    if not math.isfinite(spread):
        raise HeadwiseError("a spread needs at least 2 prompts")
    wanted = NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(power)
    return max(6, math.ceil((wanted * spread / loss) ** 2))


def _newcombe(a: np.ndarray, b: np.ndarray, confidence: float) -> Interval:
    count = len(a)
    both, only_a, only_b, none = ((x & y).sum() for x in (a, ~a) for y in (b, ~b))
    first, second = (wilson(int(x.sum()), count, confidence=confidence) for x in (a, b))
    margins = float((both + only_a) * (only_b + none) * (both + only_b) * (only_a + none))
    cross = float(both * none - only_a * only_b)
    if cross > 0:
        cross = max(cross - count / 2, 0.0)
    if margins:
        phi = cross / math.sqrt(margins)
    else:
        phi = 0.0

    def reach(down: float, up: float) -> float:
        return math.sqrt(max(0.0, down * down - 2 * phi * down * up + up * up))

    value = first.value - second.value
    low = value - reach(first.value - first.low, second.high - second.value)
    high = value + reach(first.high - first.value, second.value - second.low)
    return Interval(value, low, high, count)


@cache
def _quantile(freedom: float, confidence: float) -> float:
    """Compute a quantile of Student's t with `freedom` degrees of freedom f.

    t is sqrt(f) tan(x) where x has the density cos(x)^(f - 1).
    """
    angles = np.linspace(-math.pi / 2, math.pi / 2, 1 << 16)
    below = np.append(0.0, np.cumsum(np.cos((angles[1:] + angles[:-1]) / 2) ** (freedom - 1)))
    return math.sqrt(freedom) * math.tan(
        np.interp(1 - _tail(confidence), below / below[-1], angles)
    )


def _checked(values: Sequence[float]) -> np.ndarray:
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or not len(numbers) or not np.isfinite(numbers).all():
        raise HeadwiseError("an interval needs at least one score, each a finite number")
    return numbers


def _tail(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise HeadwiseError(f"confidence must lie between 0 and 1, got {confidence}")
    return (1 - confidence) / 2


def _z(confidence: float) -> float:
    return NormalDist().inv_cdf(1 - _tail(confidence))
