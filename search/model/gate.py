"""The gate: held-out prompts say what an allocation loses, and where a task loses too much there is
more budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from artifacts import Finding
from profiling.quality.sequences import Reference, TokenSequence
from search.model.allocation import Allocation, Heads
from search.model.limits import Limits
from search.model.refine import Trial
from search.model.task_losses import TaskLoss

# Budgets of the front's other points, as shares of what is spent.
_FRONT = (0.5, 2.0)
# Budgets that the gate tries at most; there is a set of held-out prompts for each, of a text as far
# as it reaches.
ROUNDS = 7
# What more budget is to come to, as a share of the limit, and how much more it is at least.
_AIM = 0.9
_STEP = 1.05
# Losses go with this power of those that the curves predict (text of SmolLM2, 2,048 tokens: 0.69 to
# 0.88), or with one within these bounds where two budgets say so.
_POWER = 0.7
_POWERS = (0.4, 1.5)
# Contexts of each task on which the front is measured.
_CONTEXTS = 1

Measure = Callable[[Reference, Sequence[Allocation], Sequence[int]], list[list[TaskLoss]]]
"""What allocations lose on the sequences of these numbers of a set, by task."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Point:
    """An allocation and what it loses, by task."""

    allocation: Allocation
    tasks: tuple[TaskLoss, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Gated:
    """What the gate let pass, and what reported_on says of it.

    fault: the first loss beyond a limit for which there was more budget; None where there was no
    more. points: of the front, what was chosen among them, measured on some of reported_on.
    chosen_on: all sequences by which there was more budget, those of the calibration aside."""

    fault: str | None
    chosen: Point
    points: tuple[Point, ...]
    chosen_on: Sequence[TokenSequence]
    reported_on: Sequence[TokenSequence]

    @property
    def held_out(self) -> bool:
        """Whether nothing was chosen by what reports."""
        return not any(one in self.chosen_on for one in self.reported_on)


@dataclass(frozen=True, kw_only=True, eq=False)
class Gate:
    """What it takes. sets: of held-out sequences, each unlike those before."""

    heads: Heads
    limits: Limits
    measure: Measure
    sets: Iterator[Reference]

    def run(self, total: float, best: Trial) -> Gated:
        """What passes, and the points beside it.

        What the calibration prompts lose, or are foreseen to lose, says first whether there has to
        be more, then sets of held-out prompts, one after the other. How much more is read off the
        curves. A set that raised the budget reports only where there is no other, and is not called
        held-out then.

        Args:
            total: the budget that was asked for.
            best: how it is spent best, and what the calibration prompts lose with that.

        Raises:
            Finding: nothing passes.
        """
        like = best.allocation
        chosen_on: list[TokenSequence] = []
        first = fault = self.limits.fault(best.tasks)
        spent = total
        measured = [(total, self.limits.strain(best.tasks))]
        for number, reference in enumerate(self._sets(), start=1):
            if fault is not None:
                spent = self._more(like, measured)
            chosen, looked_at, fault = self._measured(reference, self._like(like, spent))
            if fault is None:
                break
            if number == ROUNDS or spent >= self.heads.total(1.0):
                raise Finding(
                    f"the gate: {fault}, with {chosen.allocation.cost / total:.2f} times the "
                    f"budget; "
                    "ask for a larger --budget or allow more"
                )
            first = first or fault
            chosen_on += [one for one in looked_at if one not in chosen_on]
            measured.append((spent, self.limits.strain(chosen.tasks)))
        others = {
            one.digest: one
            for one in self._beside(like, spent)
            if one.digest != chosen.allocation.digest
        }
        numbers = _first(reference.sequences)
        return Gated(
            fault=first,
            chosen=chosen,
            points=tuple(self._points(reference, [chosen.allocation, *others.values()], numbers)),
            chosen_on=chosen_on,
            reported_on=reference.sequences,
        )

    def _measured(
        self, reference: Reference, one: Allocation
    ) -> tuple[Point, Sequence[TokenSequence], str | None]:
        """What an allocation loses, on which sequences, and why that is too much, None where it is
        not.

        Tasks come one after the other, those of few sequences first: where one fails, the others
        are not run."""
        found = reference.sequences
        by_task = {
            each.task: [at for at, other in enumerate(found) if other.task == each.task]
            for each in found
        }
        losses: dict[str, list[TaskLoss]] = {}
        for task in sorted(by_task, key=lambda task: len(by_task[task])):
            losses[task] = self.measure(reference, [one], by_task[task])[0]
            if fault := self.limits.fault([loss for each in losses.values() for loss in each]):
                break
        tasks = tuple(loss for task in by_task for loss in losses.get(task, ()))
        return (
            Point(allocation=one, tasks=tasks),
            [each for each in found if each.task in losses],
            fault,
        )

    def _sets(self) -> Iterator[Reference]:
        """All sets, and the last one for ever."""
        for reference in self.sets:
            yield reference
        while True:
            yield reference

    def _more(self, like: Allocation, measured: Sequence[tuple[float, float]]) -> float:
        """The budget that comes to _AIM of the limits, from budgets and their strains, the newest
        last.

        Losses go with a power of what the curves predict, kinds of prompts alike.
        """
        spent = measured[-1][0]
        strain = max(measured[-1][1], 1e-9)

        def predicted(budget: float) -> float:
            kinds = self.heads.predicted_by_kind(self._like(like, budget))
            return float(np.mean(np.log([max(loss, 1e-30) for loss in kinds.values()])))

        power = _POWER
        if len(measured) > 1 and (moved := predicted(measured[-2][0]) - predicted(spent)) > 0:
            power = float(np.clip(np.log(max(measured[-2][1], 1e-9) / strain) / moved, *_POWERS))
        wanted = predicted(spent) - max(0.0, float(np.log(strain / _AIM))) / power
        low = min(spent * _STEP, self.heads.total(1.0))
        high = self.heads.total(1.0)
        while high > low * 1.01:
            middle = (low * high) ** 0.5
            low, high = (low, middle) if predicted(middle) <= wanted else (middle, high)
        return high

    def _beside(self, like: Allocation, spent: float) -> list[Allocation]:
        """The same with other budgets."""
        budgets = [spent * share for share in _FRONT]
        return [
            self._like(like, budget) for budget in budgets if budget > self.heads.least(like.tail)
        ]

    def _like(self, like: Allocation, total: float) -> Allocation:
        """The same weights and dense tail with another total."""
        return self.heads.by_model(total, like.tail, weight=like.weight, kinds=like.kinds)

    def _points(
        self, reference: Reference, allocations: Sequence[Allocation], numbers: Sequence[int]
    ) -> list[Point]:
        """On the sequences of these numbers."""
        found = self.measure(reference, allocations, numbers)
        return [
            Point(allocation=one, tasks=tuple(tasks))
            for one, tasks in zip(allocations, found, strict=True)
        ]


def _first(found: Sequence[TokenSequence]) -> list[int]:
    """The numbers of each task's first sequences."""
    return [
        number
        for number, one in enumerate(found)
        if sum(other.task == one.task for other in found[:number]) < _CONTEXTS
    ]
