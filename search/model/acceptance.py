"""The gate: an allocation is accepted when no task loses too much on held-out prompts.

Where a task loses too much, the budget is raised and another set of prompts decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from artifacts import Finding, HeadwiseError
from profiling.progress import announce
from profiling.prompts.prompt import Prompt
from profiling.quality.sequences import Reference, TokenSequence
from search.model.allocation import Allocation, CostCurves
from search.model.limits import Limits
from search.model.losses import ContextLoss, task_figures
from search.model.run import SearchRun

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


def gate(run: SearchRun, limits: Limits, held_out: Iterator[list[Prompt]]) -> None:
    """Raise the budget until held-out losses are within the limits; add the frontier's points.

    One set of held-out prompts after the other says whether the budget has to be raised, the curves
    say how far. A set that raised the budget reports only where there is no other, and is not
    called held-out then. The run gets the accepted allocation, its losses, and the points.

    Args:
        run: the search, with the best allocation of its budget.
        limits: the most that a task may lose.
        held_out: sets of prompts, each unlike those before.

    Raises:
        Finding: nothing passes.
        HeadwiseError: a loss is not finite.
    """
    heads = run.heads
    budget = run.budget
    chosen_on: list[TokenSequence] = []
    for number, (name, reference) in enumerate(_references(run, held_out), start=1):
        losses, sequences, fault = _judge(run, limits, reference, name)
        run.add_trial(run.allocation, losses, name)
        if fault is None:
            break
        ratio = limits.worst_ratio(task_figures(losses))
        if not np.isfinite(ratio):
            raise HeadwiseError(f"the gate: {fault}: no budget mends a loss that is not finite")
        if number == ROUNDS or budget >= heads.total(1.0):
            raise Finding(
                f"the gate: {fault}, with {heads.describe(run.allocation.cost)} spent; "
                "ask for a larger --budget or allow more"
            )
        run.gate_fault = run.gate_fault or fault
        chosen_on += [each for each in sequences if each not in chosen_on]
        before = budget
        budget = _raised(heads, run.allocation, budget, ratio)
        run.allocation = heads.reallocate(run.allocation, budget)
        if run.ranks.is_first:
            announce(
                f"{name} fails: {fault}; budget raised from {heads.share(before):.3f} to "
                f"{heads.describe(budget)}"
            )
    run.losses = losses
    run.chosen_on = chosen_on
    run.reported_on = reference.sequences
    run.points = _front(run, reference, budget)
    for allocation, losses in run.points:
        run.add_trial(allocation, losses, f"first contexts of {name}")


def _references(
    run: SearchRun, held_out: Iterator[list[Prompt]]
) -> Iterator[tuple[str, Reference]]:
    """Yield the names and references of all sets, and then the last one for ever."""
    for number, prompts in enumerate(held_out, start=1):
        last = f"held-out set {number}", run.reference(prompts)
        yield last
    while True:
        yield last


def _judge(
    run: SearchRun, limits: Limits, reference: Reference, name: str
) -> tuple[Sequence[ContextLoss], Sequence[TokenSequence], str | None]:
    """Measure the allocation task by task, the one of fewest sequences first, until one fails.

    Args:
        run: the search.
        limits: the most that a task may lose.
        reference: the held-out set.
        name: of the set, for the progress.

    Returns:
        Its losses, the sequences that they were measured on, and the fault, None where it passes.
    """
    numbers: dict[str, list[int]] = {}
    for number, sequence in enumerate(reference.sequences):
        numbers.setdefault(sequence.task, []).append(number)
    losses: dict[str, Sequence[ContextLoss]] = {}
    fault = None
    for task in sorted(numbers, key=lambda task: len(numbers[task])):
        (losses[task],) = run.measure(
            reference, [run.allocation], numbers[task], name=f"{name}, {task}"
        )
        fault = limits.violation(task_figures(list(chain.from_iterable(losses.values()))))
        if fault is not None:
            break
    in_order = [loss for task in numbers for loss in losses.get(task, ())]
    sequences = [each for each in reference.sequences if each.task in losses]
    return in_order, sequences, fault


def _raised(heads: CostCurves, allocation: Allocation, budget: float, ratio: float) -> float:
    """The budget at which the predicted loss is _AIM of the limits.

    Losses are taken to be proportional to those that the curves predict, kinds of prompts alike
    (docs/internals.md has the measurements).

    Args:
        heads: curves and costs.
        allocation: to spend more on.
        budget: that it spends.
        ratio: its worst loss in multiples of its limit.
    """

    def predicted(budget: float) -> float:
        losses = heads.predicted_by_kind(heads.reallocate(allocation, budget)).values()
        return float(np.mean(np.log([max(loss, 1e-30) for loss in losses])))

    wanted = predicted(budget) - max(0.0, float(np.log(ratio / _AIM)))
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
    run: SearchRun, reference: Reference, budget: float
) -> list[tuple[Allocation, Sequence[ContextLoss]]]:
    """Measure the frontier's points on the first contexts of each task, the accepted one first."""
    accepted = run.allocation
    points = {accepted.digest: accepted}
    for factor in _FRONT:
        if budget * factor > run.heads.least(accepted.tail):
            other = run.heads.reallocate(accepted, budget * factor)
            points.setdefault(other.digest, other)
    numbers = []
    counts: dict[str, int] = {}
    for number, sequence in enumerate(reference.sequences):
        counts[sequence.task] = counts.get(sequence.task, 0) + 1
        if counts[sequence.task] <= _CONTEXTS:
            numbers.append(number)
    allocations = list(points.values())
    losses = run.measure(reference, allocations, numbers, name="points of the front")
    return list(zip(allocations, losses, strict=True))
