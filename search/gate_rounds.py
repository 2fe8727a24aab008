"""Points of the front on held-out prompts, and more budget for the heads that those show to be worst."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from artifacts import HeadwiseError
from profiling.logits import DenseLogits, Drift
from search.curves import Curves
from search.gate import Limits
from search.refine import Problem
from search.settle import Settlement, by_model

# Of the front, on held-out prompts.
_MOST_POINTS = 8
_STEP = 1.15
_ROUNDS = 12


@dataclass(frozen=True, kw_only=True, eq=False)
class Point:
    """A settlement and how it does on the held-out prompts."""

    settlement: Settlement
    drift: Drift


@dataclass(frozen=True, kw_only=True, eq=False)
class Raised:
    """points: of the front that stay one on the held-out prompts, the cheapest first. chosen: the one to serve.

    rounds: how often heads were given more for it to pass.
    """

    points: tuple[Point, ...]
    chosen: Point
    rounds: int


def raise_until(
    problem: Problem,
    settlements: Sequence[Settlement],
    model: Any,
    logits: DenseLogits,
    limits: Limits,
    *,
    curves_of: Callable[[], Curves],
) -> Raised:
    """The point for the budget, given more until the held-out prompts lose no more than the limits.

    Args:
        problem: what is known and what may be spent.
        settlements: the front by the calibration prompts, the cheapest first.
        model, logits: what is measured on.
        limits: what may be lost.
        curves_of: the curves of the held-out prompts; asked for only where more has to be given.

    Raises:
        HeadwiseError: not even much more budget is enough.
    """
    found = [
        Point(settlement=settlement, drift=problem.drift(model, logits, settlement))
        for settlement in tqdm(_thinned(settlements, problem.total), desc="held out", disable=None)
    ]
    affordable = [point for point in found if point.settlement.cost <= problem.total * (1 + 1e-9)]
    chosen = min(affordable or found[:1], key=lambda point: point.drift.mean_kl)
    rounds = 0
    fault = limits.fault(chosen.drift)
    if fault is not None:
        curves = Curves.worst([problem.curves, curves_of()])
        total, weight = max(chosen.settlement.cost, problem.total), chosen.settlement.weight
        most = float(np.nansum(np.max(problem.costs, axis=-1)))
        while fault is not None:
            # The same total first: what was held out may only want it spent elsewhere.
            settlement = by_model(curves, problem.costs, total, weight=weight)
            chosen = Point(settlement=settlement, drift=problem.drift(model, logits, settlement))
            fault, rounds = limits.fault(chosen.drift), rounds + 1
            if fault is not None and (rounds == _ROUNDS or total >= most):
                raise HeadwiseError(
                    f"the gate: on held-out prompts {fault}, with {total / problem.total:.2f} times the budget; "
                    "ask for a larger --budget or allow more"
                )
            total = min(total * _STEP, most)
        found.append(chosen)
    return Raised(points=_front(found), chosen=chosen, rounds=rounds)


def _thinned(settlements: Sequence[Settlement], total: float) -> list[Settlement]:
    """At most so many, the one nearest below the budget among them."""
    if len(settlements) <= _MOST_POINTS:
        return list(settlements)
    within = [i for i, one in enumerate(settlements) if one.cost <= total * (1 + 1e-9)]
    places = set(np.linspace(0, len(settlements) - 1, _MOST_POINTS - 1).round().astype(int).tolist())
    return [settlements[i] for i in sorted(places | {within[-1] if within else 0})]


def _front(points: Sequence[Point]) -> tuple[Point, ...]:
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.settlement.cost, p.drift.mean_kl)):
        if not kept or (
            point.drift.mean_kl < kept[-1].drift.mean_kl and point.settlement.cost > kept[-1].settlement.cost
        ):
            kept.append(point)
    return tuple(kept)
