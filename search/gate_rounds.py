"""Points of the front on held-out prompts, and more budget for the heads that those show to be worst."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from profiling.prompts.prompt import Prompt
from profiling.quality.logits import Drift
from search.curves import Curves
from search.gate import Limits
from search.refine import NothingFound, Problem
from search.settle import Settlement, by_model

# Of the front, on held-out prompts.
_MOST_POINTS = 8
_STEP = 1.15
_ROUNDS = 12


@dataclass(frozen=True, kw_only=True, eq=False)
class Point:
    """A settlement and how it does on prompts that were held out."""

    settlement: Settlement
    drift: Drift


@dataclass(frozen=True, kw_only=True, eq=False)
class Judges:
    """Prompts to judge by: how settlements do on them, and their curves, which take a while.

    fresh: nothing was decided by them.
    """

    prompts: Sequence[Prompt]
    drifts: Callable[[Sequence[Settlement]], Sequence[Drift]]
    curves: Callable[[], Curves]
    fresh: bool = True


@dataclass(frozen=True, kw_only=True, eq=False)
class Raised:
    """points: of the front that stay one on the judges' prompts, the cheapest first. chosen: the one to serve.

    rounds: how often heads were given more for it to pass. fault: why, in words. judges: by what all drifts are.
    """

    points: tuple[Point, ...]
    chosen: Point
    judges: Judges
    rounds: int = 0
    fault: str | None = None


def raise_until(
    problem: Problem,
    settlements: Sequence[Settlement],
    judges: Iterator[Judges],
    limits: Limits,
) -> Raised:
    """The point for the budget, given more until prompts that it was not made by lose no more than the limits.

    Prompts that say which heads get more can no longer judge what comes of it: the next ones do, as long as there are
    any.

    Args:
        problem: what is known and what may be spent.
        settlements: the front by the calibration prompts, the cheapest first.
        judges: one after the other, at least one.
        limits: what may be lost.

    Raises:
        NothingFound: not even much more budget is enough.
    """
    first = judge = next(judges)

    def measured(*settlements: Settlement) -> list[Point]:
        drifts = judge.drifts(settlements)
        return [Point(settlement=one, drift=drift) for one, drift in zip(settlements, drifts, strict=True)]

    found = measured(*settlements)
    affordable = [point for point in found if point.settlement.cost <= problem.total * (1 + 1e-9)]
    chosen = min(affordable or found[:1], key=lambda point: point.drift.mean_kl)
    told = fault = limits.fault(chosen.drift)
    if fault is None:
        return Raised(points=_front(found), chosen=chosen, judges=judge)
    total, weight = max(chosen.settlement.cost, problem.total), chosen.settlement.weight
    most, rounds, known = float(np.nansum(np.max(problem.costs, axis=-1))), 0, [problem.curves]
    while fault is not None:
        known.append(judge.curves())
        curves, tries = Curves.worst(known), 0
        while fault is not None:
            # The same total first: what was held out may only want it spent elsewhere.
            (chosen,), spent = measured(by_model(curves, problem.costs, total, weight=weight)), total
            fault, rounds, tries = limits.fault(chosen.drift), rounds + 1, tries + 1
            if fault is not None and (tries >= _ROUNDS or total >= most):
                raise NothingFound(
                    f"the gate: on held-out prompts {fault}, with {spent / problem.total:.2f} times the budget; "
                    "ask for a larger --budget or allow more"
                )
            total = min(total * _STEP, most) if fault is not None else total
        # What they decided they do not judge.
        judge = next(judges, None) or replace(judge, fresh=False)
        if judge.fresh:
            (chosen,) = measured(chosen.settlement)
            fault = limits.fault(chosen.drift)
    if judge.prompts is not first.prompts:
        found = measured(*(point.settlement for point in found))
    return Raised(points=_front([*found, chosen]), chosen=chosen, judges=judge, rounds=rounds, fault=told)


def thinned(settlements: Sequence[Settlement], total: float) -> list[Settlement]:
    """Of a front at most eight, the one nearest below the budget among them."""
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
