"""The gate: held-out prompts say what an allocation loses, and where a task loses too much there is more budget."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from artifacts import Finding
from profiling.quality.sequences import Reference, TokenSequence
from search.model.allocation import Allocation, Heads
from search.model.refine import Trial
from search.model.task_losses import Limits, TaskLoss

# Budgets of the front's other points, as shares of what is spent.
_FRONT = (0.5, 2.0)
# Where the gate fails: so many times the budget, least and most, so often.
_STEPS, _ROUNDS = (1.25, 2.0), 8
# What such a step is to come to, as a share of the limit; losses fall with this power of the budget (SmolLM2: 3.8).
_AIM, _POWER = 0.8, 4

Measure = Callable[[Reference, Sequence[Allocation], str], list[list[TaskLoss]]]
"""What allocations lose on a set of sequences, by task; the phase's name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Point:
    """An allocation and what it loses, by task."""

    allocation: Allocation
    tasks: tuple[TaskLoss, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Gated:
    """What the gate let pass. points: measured on the same sequences.

    chosen_on: the sequences by which there was more budget; None: no choice was made by held-out ones.
    """

    chosen: Point
    points: tuple[Point, ...]
    chosen_on: Sequence[TokenSequence] | None
    reported_on: Sequence[TokenSequence]


@dataclass(frozen=True, kw_only=True, eq=False)
class Gate:
    """What judges. sets: of held-out sequences, each unlike those before. quiet: another rank says what was found."""

    heads: Heads
    limits: Limits
    measure: Measure
    sets: Iterator[Reference]
    quiet: bool

    def run(self, total: float, best: Trial, calibration: Reference) -> Gated:
        """What passes, and the points beside it.

        The calibration prompts judge first, then a set of held-out ones. A set that raised the budget does not report
        on it, as long as there are others.

        Args:
            total: the budget that was asked for.
            best: how it is spent best.
            calibration: the sequences of its losses.

        Raises:
            Finding: nothing passes.
        """
        like, heads = best.allocation, self.heads
        chosen, spent, rounds, said, chosen_on = Point(allocation=like, tasks=best.tasks), total, 0, None, None
        reference, reports = calibration, False
        while True:
            fault = self.limits.fault(chosen.tasks)
            if fault is not None:
                said = said or fault
                if rounds == _ROUNDS or spent >= heads.total(1.0):
                    raise Finding(
                        f"the gate: {fault}, with {chosen.allocation.cost / total:.2f} times the budget; "
                        "ask for a larger --budget or allow more"
                    )
                rounds += 1
                # As much as all of attention costs is the last thing to try.
                step = float(np.clip((self.limits.strain(chosen.tasks) / _AIM) ** (1 / _POWER), *_STEPS))
                spent = min(spent * step, heads.total(1.0))
                following, reports = self._like(like, spent, like.tail), False
                chosen_on = None if reference is calibration else reference
            elif not reports and (more := next(self.sets, None)) is not None:
                following, reference, reports = chosen.allocation, more, True
            else:
                break
            called = "calibration prompts" if reference is calibration else "held-out prompts"
            (chosen,) = self._points(reference, [following], called)
        if said is not None and not self.quiet:
            more_than = chosen.allocation.cost / total
            print(f"the gate: {said}; with {more_than:.2f} times the budget it passes", file=sys.stderr)
        others = {one.digest: one for one in self._beside(like, spent) if one.digest != chosen.allocation.digest}
        return Gated(
            chosen=chosen,
            points=(chosen, *self._points(reference, list(others.values()), "held-out prompts")),
            chosen_on=None if chosen_on is None else chosen_on.sequences,
            reported_on=reference.sequences,
        )

    def _beside(self, like: Allocation, spent: float) -> list[Allocation]:
        """Other budgets, and of the other dense tails the one that loses least by the curves."""
        heads = self.heads
        budgets = [spent * share for share in _FRONT]
        found = [self._like(like, budget, like.tail) for budget in budgets if budget > heads.least(like.tail)]
        tails = [tail for tail in heads.curves if tail != like.tail and spent > heads.least(tail)]
        others = [self._like(like, spent, tail) for tail in tails]
        return found + sorted(others, key=heads.predicted)[:1]

    def _like(self, like: Allocation, total: float, tail: int) -> Allocation:
        """The same weights with another total or dense tail."""
        return self.heads.by_model(total, tail, weight=like.weight, kinds=like.kinds)

    def _points(self, reference: Reference, allocations: Sequence[Allocation], called: str) -> list[Point]:
        found = self.measure(reference, allocations, called)
        return [Point(allocation=one, tasks=tuple(tasks)) for one, tasks in zip(allocations, found, strict=True)]
