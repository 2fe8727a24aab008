"""End-to-end refinement: how the budget is spent over groups of layers, by what it does to the model's predictions.

Curves take heads one at a time on dense inputs; how much a change in one layer matters for what the model says, only
the whole model tells. A trial weighs the groups, spends a budget by that, and runs the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna

from artifacts import Artifact, HeadwiseError, ModelInfo, Prefill, SearchInfo
from kernels.patterns import Pattern
from profiling.quality.logits import DenseLogits, Drift
from runtime import Headwise
from search.claims import KEY
from search.curves import Curves
from search.ladder import BROAD_LAST_Q, LAST_Q
from search.settle import Settlement, by_head, by_model, rows_of

# Budgets of the front, as shares of the one that was asked for.
SHARES = (1.0, 0.5, 0.7, 1.4, 2.0)
_GROUPS = 6
# Weights are powers of two; curves alone are near the best, so that trials stay near equal weights.
_REACH = 1.0
# How many queries an estimate may look at: a trial may leave out the dearer ones.
_ESTIMATES = (LAST_Q, BROAD_LAST_Q)


class NothingFound(HeadwiseError):
    """The search came to its end without anything to serve."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """What is known about the heads and what may be spent.

    costs: (L, H, C). total: the budget of all heads together. describe: what an artifact says of its search.
    """

    model: ModelInfo
    describe: Callable[[Settlement], SearchInfo]
    candidates: tuple[Pattern, ...]
    curves: Curves
    costs: np.ndarray
    total: float
    dense_tail: int

    @property
    def density(self) -> np.ndarray:
        """(L, H, C) tiles computed over those of dense attention: over 1 where columns overlap tiles."""
        dense = next(c for c, pattern in enumerate(self.candidates) if pattern.kind == "dense")
        share: np.ndarray = self.curves.tiles / self.curves.tiles[..., dense : dense + 1]
        return share

    @property
    def least(self) -> float:
        """What all heads cost with their cheapest candidates."""
        return float(self.costs[self.curves.searched].min(axis=-1).sum())

    def settle(self, params: dict[str, Any] | None) -> Settlement:
        """What a trial's parameters come to; None is a budget for every head, as the paper has it."""
        if params is None:
            return by_head(self.curves, self.costs, self.total)
        weight = np.ones(len(self.costs))
        searched = np.flatnonzero(self.curves.searched)
        for number, group in enumerate(np.array_split(searched, min(_GROUPS, len(searched)))):
            weight[group] = 2.0 ** float(params.get(f"weight_{number}", 0.0))
        last_q = params.get("last_q", max(_ESTIMATES))
        allowed = np.array([getattr(pattern, "last_q", 0) <= last_q for pattern in self.candidates])
        least = float(self.costs[searched][..., allowed].min(axis=-1).sum())
        total = max(self.total * float(params.get("share", 1.0)), least * (1 + 1e-9))
        return by_model(self.curves, self.costs, total, weight=weight, allowed=allowed)

    def headwise(self, settlement: Settlement) -> Headwise:
        """The settlement as if it had been loaded, serving every length."""
        rows, patterns = rows_of(settlement, self.candidates)
        prefill = Prefill(dense_below=0, dense_tail=self.dense_tail, layers=rows)
        return Headwise(
            Artifact(model=self.model, search=self.describe(settlement), patterns=patterns, prefill=prefill)
        )

    def drift(
        self, model: Any, logits: DenseLogits, settlement: Settlement, *, which: Sequence[int] | None = None
    ) -> Drift:
        """How far the settlement leads the model's predictions away from dense attention's, on some prompts or all."""
        with self.headwise(settlement).apply(model, check_weights=False):
            return logits.drift(which)


def baselines() -> list[dict[str, Any]]:
    """The first trials: the paper's (which has no parameters), then every budget of the front with equal weights."""
    return [{}, *({"share": share} for share in SHARES)]


def objective(problem: Problem, model: Any, logits: DenseLogits) -> Any:
    """From a trial to its cost and its divergence on the calibration prompts, whose dense predictions are known."""
    groups = min(_GROUPS, int(problem.curves.searched.sum()))

    def run(trial: optuna.Trial) -> Sequence[float]:
        place = int(trial.user_attrs[KEY])
        if place:
            trial.suggest_categorical("share", SHARES)
        if place >= len(baselines()):
            trial.suggest_categorical("last_q", _ESTIMATES)
            for group in range(groups):
                trial.suggest_float(f"weight_{group}", -_REACH, _REACH)
        settlement = problem.settle(parameters(place, trial.params))
        return settlement.cost, problem.drift(model, logits, settlement).mean_kl

    return run


def parameters(place: int, params: dict[str, Any]) -> dict[str, Any] | None:
    """A trial's parameters as Problem.settle takes them."""
    return None if place == 0 else params


def front(trials: Sequence[optuna.trial.FrozenTrial]) -> list[optuna.trial.FrozenTrial]:
    """The trials that no other beats in both cost and divergence, the cheapest first; the paper's is not among them."""
    found: list[optuna.trial.FrozenTrial] = []
    for trial in sorted((t for t in trials if int(t.user_attrs[KEY])), key=lambda t: (t.values[0], t.values[1])):
        if not found or trial.values[1] < found[-1].values[1]:
            found.append(trial)
    if not found:
        raise NothingFound("no trial but the paper's was finished: allow more with --n-trials or --timeout")
    return found
