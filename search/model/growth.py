"""Growth of sizes with the length, fitted to curves of the same heads at several lengths.

Shapes: L layers, H query heads, C candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from artifacts import Growth
from kernels.patterns import NOT_SIZES, Pattern
from search.model.curves import Curves

# Which sizes of a kind grow, all by the same power. Sinks are sinks at any length.
GROWING = {
    "a_shape": ("window",),
    "vertical_slash": ("vertical", "slash"),
    "block_sparse": ("blocks",),
}
# Below this relative change a candidate is as good as dense, and a larger one is no better.
_FLOOR = 1e-9


def fit(
    curves: Mapping[int, Curves],
    candidates: Mapping[int, Sequence[Pattern]],
    choice: np.ndarray,
    length: int,
) -> Growth | None:
    """Fit the power by which each kind's sizes grow for heads to lose as much at every length.

    Candidates are fractions of the length: a head that needs the same candidate at both lengths has
    the power 1, one that needs half the fraction at twice the length has 0. The need at another
    length is read off its kind's candidates there, between two of them in the logarithm of size and
    change. The result is the median over heads and pairs of lengths, within 0 and 1.

    Args:
        curves: by length, of the same tasks and candidates.
        candidates: by length; candidate c is the same fraction at all.
        choice: (L, H) candidate of each head at `length`, -1 in layers without patterns.
        length: that the artifact's sizes are for.

    Returns:
        None where there is one length only, or no head has a kind that grows.
    """
    if len(curves) < 2:
        return None
    powers: dict[str, list[float]] = {kind: [] for kind in GROWING}
    for short, long in combinations(sorted(curves), 2):
        for layer, head in np.argwhere(choice >= 0):
            pattern = candidates[long][choice[layer, head]]
            if pattern.kind in GROWING and getattr(pattern, "coverage", None) is None:
                changes = {n: curves[n].change[layer, head] for n in (short, long)}
                power = _power(pattern, candidates, changes, short, long)
                if power is not None:
                    powers[pattern.kind].append(power)
    fitted = {
        kind: round(float(np.clip(np.median(values), 0, 1)), 3)
        for kind, values in powers.items()
        if values
    }
    if not fitted:
        return None
    return Growth(
        length=length, powers={kind: dict.fromkeys(GROWING[kind], p) for kind, p in fitted.items()}
    )


def _power(
    pattern: Pattern,
    candidates: Mapping[int, Sequence[Pattern]],
    changes: Mapping[int, np.ndarray],
    short: int,
    long: int,
) -> float | None:
    """One head's power between two lengths; None where its candidates do not reach far enough."""
    wanted = float(changes[long][list(candidates[long]).index(pattern)])
    alike = _alike(pattern, candidates[long])
    if len(alike) < 2 or wanted < _FLOOR:
        return None
    size = np.array([_size(candidates[short][c]) for c in alike], dtype=np.float64)
    # More never loses more; noise may say so.
    change = np.minimum.accumulate(np.maximum(changes[short][alike], _FLOOR))
    needed = float(np.exp(np.interp(-np.log(wanted), -np.log(change), np.log(size))))
    power = float(np.log(_size(pattern) / needed) / np.log(long / short))
    # Beyond the candidates the power is less, or more, than that of the last one, which may do.
    beyond = (wanted < change[-1] and power > 0) or (wanted > change[0] and power < 1)
    if beyond:
        return None
    return power


def _alike(pattern: Pattern, candidates: Sequence[Pattern]) -> list[int]:
    """Indices of the kind's candidates in the same proportions, the smallest first."""

    def shape(other: Pattern) -> tuple[float, ...]:
        sizes = [getattr(other, name) for name in GROWING[pattern.kind]]
        return tuple(round(float(np.log2(size / sizes[0])), 1) for size in sizes)

    def same(other: Pattern) -> bool:
        return (
            other.kind == pattern.kind
            and all(
                getattr(other, name, None) == getattr(pattern, name, None) for name in NOT_SIZES
            )
            and shape(other) == shape(pattern)
        )

    return sorted(
        (c for c, other in enumerate(candidates) if same(other)), key=lambda c: _size(candidates[c])
    )


def _size(pattern: Pattern) -> int:
    largest: int = max(getattr(pattern, name) for name in GROWING[pattern.kind])
    return largest
