"""The gate's rounds with losses from a formula: test sets, report sets and the frontier."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, nan
from typing import Any, cast

import pytest

from artifacts import Finding, HeadwiseError
from search.model.acceptance import gate
from search.model.allocation import Allocation
from search.model.limits import Limits
from search.model.losses import ContextLoss, task_figures
from search.model.run import SearchRun
from tests.search.model.made import FormulaRun, heads_of

HEADS = heads_of(0, tails=(0, 64, 256), heads=4, candidates=8)
TOTAL = HEADS.total(0.15)
BEST = HEADS.allocate(TOTAL, 64)
# A limit a little above the best allocation's predicted loss.
JUST_ABOVE = 1.05 * HEADS.predicted(BEST)


@dataclass(frozen=True)
class Sequence:
    task: str
    of: str


@dataclass(frozen=True)
class Prompts:
    """A named set of prompts in place of a reference: four contexts of facts, and one of prose."""

    name: str

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        return tuple(Sequence(task, self.name) for task in ["facts"] * 4 + ["prose"])


def losses(allocation: Allocation, factor: float) -> tuple[ContextLoss, ...]:
    return (ContextLoss(task="any", digest="", kl=factor * HEADS.predicted(allocation)),)


def passed(
    factors: Mapping[str, float], limit: float
) -> tuple[SearchRun, list[tuple[str, float, Any]]]:
    """Run the gate with losses of each set at a factor times the prediction.

    Returns the run, and (set, cost, numbers) of each measurement, in order."""
    run = FormulaRun(
        lambda prompts, one, numbers: losses(one, factors[prompts.name]),
        heads=HEADS,
        budget=TOTAL,
        allocation=BEST,
    )
    held_out = cast(Any, iter([Prompts(name) for name in factors]))
    gate(cast(Any, run), Limits(max_kl=limit), held_out)
    # Each allocation tested on a set, and each point, is a trial.
    sets = [name for _, _, name in run.trials]
    rounds = len(sets) - len(cast(Any, run).points)
    # The last set serves where the sets are fewer than the rounds.
    names = [f"held-out set {min(at, len(factors))}" for at in range(1, rounds + 1)]
    assert sets[:rounds] == names and set(sets[rounds:]) == {f"first contexts of {names[-1]}"}
    measured = {one.digest for _, one, _ in run.measured}
    assert {one.digest for one, _, _ in run.trials} == measured
    return cast(Any, run), [
        (prompts.name, one.cost, numbers) for prompts, one, numbers in run.measured
    ]


def held_out(run: SearchRun) -> bool:
    return cast(Any, SearchRun.held_out).fget(run)


@pytest.mark.parametrize("factor", [nan, inf])
def test_gate_of_a_loss_that_is_no_number_ends_at_once(factor):
    with pytest.raises(HeadwiseError, match=r"the gate: any: KL .* no budget mends a loss"):
        passed({"first": factor, "second": 1.0}, JUST_ABOVE)


def test_first_pass_is_reported_on_first_held_out_set():
    run, measured = passed({"first": 1.1, "second": 1.0}, 100.0)
    assert run.allocation.digest == BEST.digest
    assert run.gate_fault is None and run.chosen_on == []
    assert held_out(run) and {name for name, _, _ in measured} == {"first"}
    # By task, the one with few sequences first. Then half and twice the budget, each on the first
    # contexts of the tasks, like the selected allocation.
    numbers = [numbers for _, _, numbers in measured]
    assert numbers == [[4], [0, 1, 2, 3], *[[0, 4]] * len(run.points)]
    assert run.points[0][0].digest == BEST.digest
    assert len(run.points) == 3
    assert {allocation.tail for allocation, _ in run.points} == {64}
    for allocation, lost in run.points:
        assert lost == losses(allocation, 1.1)
    assert tuple(run.losses) == 2 * run.points[0][1]


def test_failed_set_raises_the_budget_and_another_set_reports():
    factors = {"first": 1.5, "second": 1.5, "third": 1.0}
    run, measured = passed(factors, JUST_ABOVE)
    evaluated = [(name, cost) for name, cost, numbers in measured if numbers == [4]]
    assert [name for name, _ in evaluated] == ["first", "second"]
    # Where a task fails the others are not run, and raised nothing.
    failed = [name for name, _, numbers in measured if numbers == [0, 1, 2, 3]]
    assert failed == ["second"]
    assert run.chosen_on == [Sequence("prose", "first")]
    assert len(run.reported_on) == 5 and held_out(run)
    assert run.allocation.cost == evaluated[-1][1] > BEST.cost
    # One step reaches the target, slightly below the limit.
    assert 0.5 < 1.5 * HEADS.predicted(run.allocation) / JUST_ABOVE <= 0.91


def test_failed_set_is_reported_with_raised_budget(capsys):
    passed({"first": 1.5, "second": 1.0}, JUST_ABOVE)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    says = (
        r"held-out set 1 fails: any: KL to dense attention is [\d.]+ nats a token, the limit "
        r"is [\d.]+ \(--max-kl\); budget raised from 0\.150 to 0\.(\d+) of dense attention's "
        r"operations"
    )
    matched = re.fullmatch(says, lines[0])
    assert matched is not None, lines[0]
    assert 0.15 < float(f"0.{matched[1]}") < 1


def test_without_another_set_the_raising_set_reports_as_not_held_out():
    run, _ = passed({"first": 1.5}, JUST_ABOVE)
    assert run.chosen_on == [run.reported_on[4]] and not held_out(run)


def test_all_failed_sets_are_named():
    factors = {"first": 1.5, "second": 3.0, "third": 1.0}
    run, _ = passed(factors, JUST_ABOVE)
    assert run.chosen_on == [Sequence("prose", "first"), Sequence("prose", "second")]
    assert held_out(run) and run.reported_on == Prompts("third").sequences


def test_pooled_answers_fail_where_each_task_passes():
    """Every other context loses three of ten answers; in a single task that may be chance."""

    def of(task: str) -> list[ContextLoss]:
        ten = dict.fromkeys(("answers", "dense_right", "tokens"), 10)
        return [
            ContextLoss(task=task, digest=f"{task}{at}", kl=0.01, lost=at % 2 * 3, **ten)
            for at in range(4)
        ]

    lost = {"facts": of("facts"), "prose": of("prose")}
    assert all(Limits().violation(task_figures(each)) is None for each in lost.values())
    run = FormulaRun(
        lambda prompts, one, numbers: lost[prompts.sequences[numbers[0]].task],
        heads=HEADS,
        budget=TOTAL,
        allocation=BEST,
    )
    sets = cast(Any, iter([Prompts("first")]))
    with pytest.raises(Finding, match=r"all answers: of 80 correct answers 12 are lost"):
        gate(cast(Any, run), Limits(), sets)


def test_search_that_never_passes_raises_finding():
    says = r"the gate: any: KL to dense attention is .* of dense attention's operations spent; ask"
    with pytest.raises(Finding, match=says):
        passed({"first": 1e9}, 1e-9)
