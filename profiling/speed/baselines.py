"""Dense baselines of a speed-up: the model's own attention, and Headwise's dense kernel.

A speed-up is quoted against the faster of the two, the fastest dense baseline, then against the
default attention.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import comb
from typing import Any

from artifacts import HeadwiseError

# The names of both among the methods of a measurement.
MODEL = "dense"
KERNEL = "dense_kernel"
HEADWISE = "headwise"
# Their labels in tables, and their names as baselines in an artifact's evidence.
LABELS = {
    MODEL: "default attention (sdpa)",
    KERNEL: "dense by Headwise's kernel",
    HEADWISE: "Headwise, index builds included",
}
EVIDENCE = {MODEL: "dense attention by sdpa", KERNEL: "dense attention by Headwise's kernel"}
# The columns of a table that has a speed-up, as `cells` fills them.
COLUMNS = ("x fastest dense", "x sdpa")

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
    """Compute the median ratio of paired times, with bounds by order statistics (sign test).

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


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """Speed-up over each dense attention that was timed in the same rounds, by its name.

    Attributes:
        bounds: of each the interval of speed.ratios, where there are rounds.
        rounds: how many.
    """

    over: Mapping[str, float]
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    rounds: int = 0

    @property
    def fastest(self) -> str:
        """Name of the fastest dense baseline."""
        return min(self.over, key=lambda name: self.over[name])

    @property
    def value(self) -> float:
        """Speed-up over the fastest dense baseline."""
        return self.over[self.fastest]


def dense(model: Any, name: str) -> AbstractContextManager[object]:
    """A model at work by the dense attention of that name, MODEL or KERNEL, until it is left."""
    if name != KERNEL:
        return nullcontext()
    from runtime import apply_dense

    return apply_dense(model)


def speedup(seconds: Sequence[float], dense: Mapping[str, Sequence[float]]) -> Speedup:
    """Compute median ratios of dense seconds to these, round by round.

    One round has no bounds.
    """
    ratios = {name: ratio_of_pairs(rounds, seconds) for name, rounds in dense.items()}
    return Speedup(
        over={name: ratio.value for name, ratio in ratios.items()},
        bounds={
            name: (ratio.low, ratio.high) for name, ratio in ratios.items() if len(seconds) > 1
        },
        rounds=len(seconds),
    )


def of_rounds(seconds: Mapping[str, Sequence[float]], name: str) -> Speedup:
    """Compute the speed-up of one of several interleaved methods, both dense ones among them."""
    return speedup(
        seconds[name], {each: seconds[each] for each in (MODEL, KERNEL) if each in seconds}
    )


def cells(speedup: Speedup | None) -> tuple[str, str]:
    """A speed-up under COLUMNS."""
    if speedup is None:
        return "-", "-"
    if MODEL in speedup.over:
        over_model = f"{speedup.over[MODEL]:.2f}x"
    else:
        over_model = "-"
    return f"{speedup.value:.2f}x", over_model


def sentence(speedup: Speedup) -> str:
    """Say a speed-up with its bounds: `1.69 times as fast (1.60 to 1.75) as ...`."""
    text = _times(speedup, speedup.fastest, "the fastest dense baseline")
    if MODEL in speedup.over:
        text += ", " + _times(speedup, MODEL, "default attention (sdpa)")
    if speedup.bounds and speedup.rounds < LEAST:
        text += (
            f"; of {speedup.rounds} rounds, too few for an interval of 95%, the least and the most"
        )
    return text


def rows(seconds: Mapping[str, float]) -> list[str]:
    """Lines of seconds: default attention, Headwise's dense kernel, and Headwise."""
    return [
        f"  {label:<34}{seconds[name]:>9.3f} s" for name, label in LABELS.items() if name in seconds
    ]


def _times(speedup: Speedup, name: str, baseline: str) -> str:
    ratio = speedup.over[name]
    bounds = speedup.bounds.get(name)
    alike = bounds is not None and bounds[0] <= 1 <= bounds[1]
    if ratio < 1 and not alike:
        if bounds:
            around = f" ({1 / bounds[1]:.2f} to {1 / bounds[0]:.2f})"
        else:
            around = ""
        return f"{1 / ratio:.2f} times SLOWER{around} than {baseline}"
    around = ""
    if bounds:
        if alike:
            noise = ", no difference beyond noise"
        else:
            noise = ""
        around = f" ({bounds[0]:.2f} to {bounds[1]:.2f}{noise})"
    return f"{ratio:.2f} times as fast{around} as {baseline}"
