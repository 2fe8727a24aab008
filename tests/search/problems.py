"""Problems made of curves that a test writes down, and drifts by a formula in place of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kernels.patterns import Pattern
from profiling.quality.logits import Drift
from search.curves import Curves
from search.refine import Problem
from search.settle import Settlement


class Formula(Problem):
    """A problem whose settlements drift as the function in place of the model says: KL in nats, perplexity ratio."""

    def drift(
        self,
        model: Callable[[Settlement], tuple[float, float]],
        logits: Any,
        settlement: Settlement,
        *,
        which: Sequence[int] | None = None,
    ) -> Drift:
        kl, ratio = model(settlement)
        return Drift(kl=np.array([kl]), loss=np.array([np.log(ratio)]), dense_loss=np.array([0.0]))


def problem_of(curves: Curves, costs: np.ndarray, *, total: float, candidates: tuple[Pattern, ...]) -> Formula:
    """A problem without a model."""
    nothing: Any = None
    return Formula(
        model=nothing,
        describe=nothing,
        candidates=candidates,
        curves=curves,
        costs=costs,
        total=total,
        dense_tail=64,
    )
