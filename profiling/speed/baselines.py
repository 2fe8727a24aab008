"""Both dense attentions that a speed-up is against: the model's own and Headwise's kernel over every key.

A speed-up that is said first is against the better of the two; the one against the model as it comes stands beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from runtime import apply_dense

# The names of both among the methods of a measurement.
MODEL, KERNEL = "dense", "dense_kernel"
HEADWISE = "headwise"
# What they are called for people, and as baselines in an artifact's evidence.
LABELS = {
    MODEL: "dense as the model comes",
    KERNEL: "dense by Headwise's kernel",
    HEADWISE: "Headwise, index builds included",
}
EVIDENCE = {MODEL: "dense attention by sdpa", KERNEL: "dense attention by Headwise's kernel"}
# The columns of a table that has a speed-up, as `cells` fills them.
COLUMNS = ("x better dense", "x model's dense")


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """How many times as fast something is as each dense attention that was timed beside it, by its name."""

    over: Mapping[str, float]

    @property
    def better(self) -> str:
        """The faster dense attention."""
        return min(self.over, key=lambda name: self.over[name])

    @property
    def value(self) -> float:
        """How many times as fast as the better dense."""
        return self.over[self.better]


def dense(model: Any, name: str) -> AbstractContextManager[object]:
    """A model at work by the dense attention of that name, MODEL or KERNEL, until it is left."""
    return apply_dense(model) if name == KERNEL else nullcontext()


def speedup(seconds: Sequence[float], dense: Mapping[str, Sequence[float]]) -> Speedup:
    """Medians over rounds of the ratios of dense seconds to these, which were taken in the same rounds."""
    return Speedup(
        over={
            name: statistics.median(d / s for d, s in zip(rounds, seconds, strict=True))
            for name, rounds in dense.items()
        }
    )


def of_rounds(seconds: Mapping[str, Sequence[float]], name: str) -> Speedup:
    """The speed-up of one of several methods that were timed in turn, both dense ones among them."""
    return speedup(seconds[name], {each: seconds[each] for each in (MODEL, KERNEL) if each in seconds})


def cells(found: Speedup | None) -> tuple[str, str]:
    """A speed-up under COLUMNS."""
    if found is None:
        return "-", "-"
    return f"{found.value:.2f}x", f"{found.over[MODEL]:.2f}x" if MODEL in found.over else "-"


def told(found: Speedup) -> str:
    """A speed-up in words, such as `1.69 times as fast as the better dense, 8.43 times as the model comes`."""
    said = _times(found.value, "the better dense")
    if MODEL in found.over:
        said += ", " + _times(found.over[MODEL], "the model as it comes")
    return said


def rows(seconds: Mapping[str, float]) -> list[str]:
    """The rows of dense attention as the model comes, by Headwise's kernel, and of Headwise, with their seconds."""
    return [f"  {label:<34}{seconds[name]:>9.3f} s" for name, label in LABELS.items() if name in seconds]


def _times(ratio: float, what: str) -> str:
    return f"{ratio:.2f} times as fast as {what}" if ratio >= 1 else f"{1 / ratio:.2f} times SLOWER than {what}"
