"""Confidence intervals of scores, and whether two methods differ: no difference is called that an interval holds.

Shapes: n prompts, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from artifacts import HeadwiseError

CONFIDENCE = 0.95
RESAMPLES = 10_000
# Cells of the table of resamples that are in memory at once.
_CELLS = 1 << 22


@dataclass(frozen=True)
class Interval:
    """An estimate from `count` prompts and the bounds that hold the true value at the confidence asked for."""

    value: float
    low: float
    high: float
    count: int

    def holds(self, value: float) -> bool:
        """Whether the value is within the bounds, these included."""
        return self.low <= value <= self.high


def wilson(right: int, count: int, *, confidence: float = CONFIDENCE) -> Interval:
    """The score interval of a share of right answers (Wilson 1927): sound for few prompts and for none or all right."""
    if not 0 <= right <= count or count < 1:
        raise HeadwiseError(f"{right} right of {count}: give at least 1 prompt and at most as many right ones")
    z = _z(confidence)
    share, spread = right / count, z * z / count
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    # Rounding must not put the bound of none or all right beside 0 or 1.
    low = 0.0 if right == 0 else middle - half
    high = 1.0 if right == count else middle + half
    return Interval(share, low, high, count)


def bootstrap(
    values: Sequence[float], *, confidence: float = CONFIDENCE, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """The percentile interval of a mean over resamples of the prompts (Efron 1979); the same for the same seed."""
    found = _checked(values)
    means = _resampled_means(found, resamples, seed)
    low, high = np.quantile(means, [_tail(confidence), 1 - _tail(confidence)])
    return Interval(float(found.mean()), float(low), float(high), len(found))


def student(values: Sequence[float], *, confidence: float = CONFIDENCE) -> Interval:
    """Student's t interval of a mean (1908): of few values, of which the bootstrap's interval is too narrow.

    Student's t with n - 1 degrees of freedom is sqrt(n - 1) tan(x) where x has the density cos(x)^(n - 2).
    """
    found = _checked(values)
    count = len(found)
    if count < 2:
        raise HeadwiseError(f"an interval needs at least 2 values, got {count}")
    angles = np.linspace(-math.pi / 2, math.pi / 2, 1 << 16)
    below = np.append(0.0, np.cumsum(np.cos((angles[1:] + angles[:-1]) / 2) ** (count - 2)))
    quantile = math.sqrt(count - 1) * math.tan(np.interp(1 - _tail(confidence), below / below[-1], angles))
    value, half = float(found.mean()), quantile * float(found.std(ddof=1)) / math.sqrt(count)
    return Interval(value, value - half, value + half, count)


def mean_interval(values: Sequence[float], *, confidence: float = CONFIDENCE, seed: int = 0) -> Interval:
    """Wilson's interval where every score is 0 or 1, and the bootstrap's elsewhere."""
    found = _checked(values)
    if np.isin(found, (0, 1)).all():
        return wilson(int(found.sum()), len(found), confidence=confidence)
    return bootstrap(values, confidence=confidence, seed=seed)


def paired_difference(
    a: Sequence[float], b: Sequence[float], *, confidence: float = CONFIDENCE, seed: int = 0
) -> Interval:
    """The interval of the mean of a - b over the same prompts.

    Where every score is 0 or 1, Newcombe's (1998, Statistics in Medicine 17:2635, method 10), which is sound for few
    prompts and where none or all are right; elsewhere the bootstrap's over pairs.
    """
    first, second = _checked(a), _checked(b)
    if len(first) != len(second):
        raise HeadwiseError(f"scores of {len(first)} and {len(second)} prompts cannot be paired")
    if np.isin(first, (0, 1)).all() and np.isin(second, (0, 1)).all():
        return _newcombe(first.astype(bool), second.astype(bool), confidence)
    return bootstrap((first - second).tolist(), confidence=confidence, seed=seed)


def differs(a: Sequence[float], b: Sequence[float], *, confidence: float = CONFIDENCE, seed: int = 0) -> bool:
    """Whether the scores of the same prompts differ by more than chance: 0 is outside the interval of a - b.

    Too few pairs differ in nothing, whatever they are: if every one of n favours the same side, chance alone does that
    with probability 2^(1-n), which takes 6 pairs to fall below 5%.
    """
    enough = 2.0 ** (1 - len(a)) <= 1 - confidence
    return enough and not paired_difference(a, b, confidence=confidence, seed=seed).holds(0)


def sign_flip(differences: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0) -> float:
    """The p-value of a mean of paired differences that is as likely to be of either sign (Fisher's randomisation test).

    Every assignment of signs where there are at most `resamples`, which for right and wrong answers is McNemar's exact
    test; that many random ones, and the one that was found, elsewhere.
    """
    found = _checked(differences)
    found = found[found != 0]
    count = len(found)
    if not count:
        return 1.0
    exact = count < 63 and 1 << count <= resamples
    if exact:
        signs = 1 - 2 * ((np.arange(1 << count)[:, None] >> np.arange(count)) & 1)
    else:
        signs = np.random.default_rng(seed).choice((-1, 1), size=(resamples, count))
    # Sums in another order must not be farther than they are.
    far = np.abs(signs @ found) >= abs(found.sum()) * (1 - 1e-9)
    return float(far.mean()) if exact else float((far.sum() + 1) / (resamples + 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values after Holm's correction (1979): of those below 0.05, none errs in 95% of such tables."""
    found = [1.0] * len(p_values)
    highest = 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[at]))
        found[at] = highest
    return found


def prompts_needed(differences: Sequence[float], loss: float = 0.05, *, power: float = 0.8) -> int:
    """How many prompts tell a mean loss of that size, at 95%, so often: by the spread of these paired differences.

    ((z(0.975) + z(power)) * spread / loss)^2, and at least the 6 below which chance alone favours one side in all.
    """
    spread = float(_checked(differences).std(ddof=1)) if len(differences) > 1 else math.nan
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
    phi = cross / math.sqrt(margins) if margins else 0.0

    def reach(down: float, up: float) -> float:
        return math.sqrt(max(0.0, down * down - 2 * phi * down * up + up * up))

    value = first.value - second.value
    low = value - reach(first.value - first.low, second.high - second.value)
    high = value + reach(first.high - first.value, second.value - second.low)
    return Interval(value, low, high, count)


def _resampled_means(values: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """(R) means of n values drawn with replacement."""
    rng = np.random.default_rng(seed)
    rows = max(1, _CELLS // len(values))
    parts = [
        values[rng.integers(len(values), size=(min(rows, resamples - start), len(values)))].mean(axis=1)
        for start in range(0, resamples, rows)
    ]
    return np.concatenate(parts)


def _checked(values: Sequence[float]) -> np.ndarray:
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1 or not len(found) or not np.isfinite(found).all():
        raise HeadwiseError("an interval needs at least one score, each a finite number")
    return found


def _tail(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise HeadwiseError(f"confidence must lie between 0 and 1, got {confidence}")
    return (1 - confidence) / 2


def _z(confidence: float) -> float:
    return NormalDist().inv_cdf(1 - _tail(confidence))
