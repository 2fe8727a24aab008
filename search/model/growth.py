"""How sizes go with the length: rules fitted to curves of the same heads at several lengths.

Shapes: L layers, H query heads, C candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from artifacts import Growth
from kernels.patterns import Pattern
from search.model.curves import Curves

# Which sizes of a kind grow, all by the same power. Sinks are sinks at any length.
GROWING = {
    "a_shape": ("window",),
    "vertical_slash": ("vertical", "slash"),
    "block_sparse": ("blocks",),
}
# Below this relative change a rung is as good as dense, and a larger one cannot be distinguished
# from it.
_FLOOR = 1e-9


def fit(
    curves: Mapping[int, Curves],
    candidates: Mapping[int, Sequence[Pattern]],
    chosen: np.ndarray,
    length: int,
) -> Growth | None:
    """The power of each kind by which its sizes have to go for heads to lose as much at every
    length.

    Rungs are shares of the length: a head that needs the same rung at both lengths has the power 1,
    one that needs half the share at twice the length has 0. What a head needs at another length is
    read off its kind's rungs there, between two of them in the logarithm of size and change. The
    median over heads and pairs of lengths, within 0 and 1.

    Args:
        curves: by length, of the same tasks and candidates.
        candidates: by length; rung c is the same share at all.
        chosen: (L, H) rung of each head at `length`, -1 in layers left alone.
        length: that the artifact's sizes are for.

    Returns:
        None where there is one length only, or no head has a kind that grows.
    """
    if len(curves) < 2:
        return None
    powers: dict[str, list[float]] = {kind: [] for kind in GROWING}
    for short, long in combinations(sorted(curves), 2):
        for layer, head in np.argwhere(chosen >= 0):
            pattern = candidates[long][chosen[layer, head]]
            if pattern.kind in GROWING and getattr(pattern, "coverage", None) is None:
                changes = {n: curves[n].change[layer, head] for n in (short, long)}
                power = _power(pattern, candidates, changes, short, long)
                if power is not None:
                    powers[pattern.kind].append(power)
    fitted = {
        kind: round(float(np.clip(np.median(found), 0, 1)), 3)
        for kind, found in powers.items()
        if found
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
    """One head's power between two lengths; None where its rungs do not reach far enough."""
    wanted = float(changes[long][list(candidates[long]).index(pattern)])
    rungs = _alike(pattern, candidates[long])
    if len(rungs) < 2 or wanted < _FLOOR:
        return None
    size = np.array([_size(candidates[short][c]) for c in rungs], dtype=np.float64)
    # More never loses more; noise may say so.
    change = np.minimum.accumulate(np.maximum(changes[short][rungs], _FLOOR))
    needed = float(np.exp(np.interp(-np.log(wanted), -np.log(change), np.log(size))))
    power = float(np.log(_size(pattern) / needed) / np.log(long / short))
    # Past the rungs the power is known to be less, or more, than that of the last one: it may say
    # enough.
    beyond = (wanted < change[-1] and power > 0) or (wanted > change[0] and power < 1)
    return None if beyond else power


def _alike(pattern: Pattern, candidates: Sequence[Pattern]) -> list[int]:
    """The indices of the kind's rungs in the same proportions, the smallest first."""

    def shape(other: Pattern) -> tuple[float, ...]:
        sizes = [getattr(other, name) for name in GROWING[pattern.kind]]
        return tuple(round(float(np.log2(size / sizes[0])), 1) for size in sizes)

    def same(other: Pattern) -> bool:
        fields = ("last_q", "coverage")
        return (
            other.kind == pattern.kind
            and all(getattr(other, name, None) == getattr(pattern, name, None) for name in fields)
            and shape(other) == shape(pattern)
        )

    return sorted(
        (c for c, other in enumerate(candidates) if same(other)), key=lambda c: _size(candidates[c])
    )


def _size(pattern: Pattern) -> int:
    largest: int = max(getattr(pattern, name) for name in GROWING[pattern.kind])
    return largest
