"""The gate: an allocation is accepted when no task loses too much on held-out prompts.

Where a task loses too much, the budget is raised and another set of prompts decides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from artifacts import Finding
from profiling.progress import announce
from profiling.prompts.prompt import Prompt
from profiling.quality.sequences import Reference, TokenSequence
from search.model.allocation import Allocation, Heads
from search.model.limits import Limits
from search.model.search_run import Measured, SearchRun, add_trial
from search.model.task_losses import TaskLoss
from search.study import Study

# Budgets of the frontier's other points, relative to the accepted one.
_FRONT = (0.5, 2.0)
# Budgets that the gate tries at most; each has its own set of held-out prompts, as far as texts
# reach.
ROUNDS = 7
# Loss to aim at with a raised budget, relative to the limit, and the smallest raise.
_AIM = 0.9
_STEP = 1.05
# Contexts of each task on which the frontier is measured.
_CONTEXTS = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Accepted:
    """An allocation that the gate passes, with its losses on `reported_on`.

    Attributes:
        fault: the first loss beyond a limit, for which the budget was raised; None if it was not.
        points: of the frontier, `measured` among them, run on a part of reported_on.
        chosen_on: held-out sequences that raised the budget.
    """

    fault: str | None
    measured: Measured
    points: tuple[Measured, ...]
    chosen_on: Sequence[TokenSequence]
    reported_on: Sequence[TokenSequence]

    @property
    def held_out(self) -> bool:
        """True if no sequence that reports raised the budget."""
        return not any(each in self.chosen_on for each in self.reported_on)


def gate(
    run: SearchRun,
    heads: Heads,
    limits: Limits,
    total: float,
    best: Allocation,
    held_out: Iterator[list[Prompt]],
    study: Study,
) -> Accepted:
    """Raise the budget until held-out losses are within the limits; add the frontier's points.

    One set of held-out prompts after the other says whether the budget has to be raised, the curves
    say how far. A set that raised the budget reports only where there is no other, and is not
    called held-out then.

    Args:
        run: the search.
        heads: curves and costs.
        limits: the most that a task may lose.
        total: the budget before it is raised.
        best: its best allocation.
        held_out: sets of prompts, each unlike those before.
        study: gets each measured allocation as a trial.

    Raises:
        Finding: nothing passes.
    """
    allocation = best
    budget = total
    chosen_on: list[TokenSequence] = []
    first_fault = None
    for number, reference in enumerate(_references(run, held_out), start=1):
        name = f"held-out set {number}"
        measured, sequences, fault = _judge(run, limits, reference, allocation, name)
        add_trial(study, heads, measured, name)
        if fault is None:
            break
        if number == ROUNDS or budget >= heads.total(1.0):
            raise Finding(
                f"the gate: {fault}, with {heads.describe(measured.allocation.cost)} spent; "
                "ask for a larger --budget or allow more"
            )
        first_fault = first_fault or fault
        chosen_on += [each for each in sequences if each not in chosen_on]
        before = budget
        budget = _raised(heads, allocation, budget, limits.strain(measured.tasks))
        allocation = heads.reallocate(allocation, budget)
        if run.ranks.is_first:
            announce(
                f"{name} fails: {fault}; budget raised from {heads.share(before):.3f} to "
                f"{heads.describe(budget)}"
            )
    points = _front(run, heads, reference, measured.allocation, budget)
    for point in points:
        add_trial(study, heads, point, f"first contexts of {name}")
    return Accepted(
        fault=first_fault,
        measured=measured,
        points=points,
        chosen_on=chosen_on,
        reported_on=reference.sequences,
    )


def _references(run: SearchRun, held_out: Iterator[list[Prompt]]) -> Iterator[Reference]:
    """Yield all sets, and then the last one for ever."""
    for prompts in held_out:
        reference = run.reference(prompts)
        yield reference
    while True:
        yield reference


def _judge(
    run: SearchRun, limits: Limits, reference: Reference, allocation: Allocation, name: str
) -> tuple[Measured, Sequence[TokenSequence], str | None]:
    """Measure an allocation task by task, the one of fewest sequences first, until one fails.

    Args:
        run: the search.
        limits: the most that a task may lose.
        reference: the held-out set.
        allocation: to measure.
        name: of the set, for the progress.

    Returns:
        Its losses, the sequences that they were measured on, and the fault, None where it passes.
    """
    numbers: dict[str, list[int]] = {}
    for number, sequence in enumerate(reference.sequences):
        numbers.setdefault(sequence.task, []).append(number)
    losses: dict[str, Sequence[TaskLoss]] = {}
    fault = None
    for task in sorted(numbers, key=lambda task: len(numbers[task])):
        (measured,) = run.measure(reference, [allocation], numbers[task], name=f"{name}, {task}")
        losses[task] = measured.tasks
        fault = limits.fault([loss for tasks in losses.values() for loss in tasks])
        if fault is not None:
            break
    tasks = tuple(loss for task in numbers for loss in losses.get(task, ()))
    sequences = [each for each in reference.sequences if each.task in losses]
    return Measured(allocation=allocation, tasks=tasks), sequences, fault


def _raised(heads: Heads, allocation: Allocation, budget: float, strain: float) -> float:
    """The budget at which the predicted loss is _AIM of the limits.

    Losses are taken to be proportional to those that the curves predict, kinds of prompts alike
    (docs/internals.md has the measurements).

    Args:
        heads: curves and costs.
        allocation: to spend more on.
        budget: that it spends.
        strain: how many times a limit it loses.
    """

    def predicted(budget: float) -> float:
        losses = heads.predicted_by_kind(heads.reallocate(allocation, budget)).values()
        return float(np.mean(np.log([max(loss, 1e-30) for loss in losses])))

    wanted = predicted(budget) - max(0.0, float(np.log(strain / _AIM)))
    low = min(budget * _STEP, heads.total(1.0))
    high = heads.total(1.0)
    while high > low * 1.01:
        middle = (low * high) ** 0.5
        if predicted(middle) <= wanted:
            high = middle
        else:
            low = middle
    return high


def _front(
    run: SearchRun, heads: Heads, reference: Reference, accepted: Allocation, budget: float
) -> tuple[Measured, ...]:
    """Measure the frontier's points on the first contexts of each task, `accepted` first."""
    points = {accepted.digest: accepted}
    for factor in _FRONT:
        if budget * factor > heads.least(accepted.tail):
            other = heads.reallocate(accepted, budget * factor)
            points.setdefault(other.digest, other)
    numbers = []
    counts: dict[str, int] = {}
    for number, sequence in enumerate(reference.sequences):
        counts[sequence.task] = counts.get(sequence.task, 0) + 1
        if counts[sequence.task] <= _CONTEXTS:
            numbers.append(number)
    return tuple(run.measure(reference, list(points.values()), numbers, name="points of the front"))
