"""The gate's rounds, with losses by a formula in place of a model: who judges, who reports, and
what is beside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from artifacts import Finding
from search.model.allocation import Allocation, Heads
from search.model.gate import Gate, Gated
from search.model.limits import Limits
from search.model.refine import Trial
from search.model.task_losses import ContextLoss, TaskLoss
from tests.search.model.made import heads_of

TAILS = (0, 64, 256)


@dataclass(frozen=True)
class One:
    task: str
    of: str


@dataclass(frozen=True)
class Prompts:
    """In place of a reference: what tells one set of sequences from another, and its sequences'
    tasks."""

    name: str

    @property
    def sequences(self) -> tuple[One, ...]:
        return tuple(One(task, self.name) for task in ["facts"] * 4 + ["prose"])


def lost(heads: Heads, one: Allocation, factor: float) -> tuple[TaskLoss, ...]:
    return (TaskLoss.of("any", [ContextLoss(digest="", kl=factor * heads.predicted(one))]),)


def made() -> Heads:
    return heads_of(0, tails=TAILS, heads=4, candidates=8)


def passed(
    factors: Mapping[str, float], limit: float, said: list[tuple[str, float, Any]] | None = None
) -> tuple[Gated, Heads, Allocation]:
    """What passes where each set loses so many times what the curves say; said: who measured what,
    and on which."""
    heads, sets = made(), {name: Prompts(name) for name in factors}

    def measure(reference: Any, some: Sequence[Allocation], numbers: Any) -> list[list[TaskLoss]]:
        if said is not None:
            said.extend((reference.name, one.cost, numbers) for one in some)
        return [list(lost(heads, one, factors[reference.name])) for one in some]

    held_out: Any = (one for name, one in sets.items() if name != "calibration")
    gate = Gate(heads=heads, limits=Limits(kl=limit), measure=measure, sets=held_out)
    best = heads.by_model(heads.total(0.15), 64)
    trial = Trial(name="curves", allocation=best, tasks=lost(heads, best, factors["calibration"]))
    return gate.run(heads.total(0.15), trial), heads, best


def test_what_passes_at_once_is_reported_on_the_first_held_out_set() -> None:
    said: list[tuple[str, float, Any]] = []
    gated, heads, best = passed({"calibration": 1.0, "first": 1.1, "second": 1.0}, 100.0, said)
    assert gated.chosen.allocation.digest == best.digest
    assert gated.fault is None and gated.chosen_on == []
    assert gated.held_out and {name for name, _, _ in said} == {"first"}
    # By task, the one with few sequences first. Then half and twice the budget, each on the first
    # contexts of the tasks, as what was chosen.
    assert [numbers for _, _, numbers in said] == [[4], [0, 1, 2, 3], *[[0, 4]] * len(gated.points)]
    assert gated.points[0].allocation.digest == best.digest
    assert len(gated.points) == 3 and {point.allocation.tail for point in gated.points} == {64}
    assert all(point.tasks == lost(heads, point.allocation, 1.1) for point in gated.points)
    assert gated.chosen.tasks == 2 * gated.points[0].tasks


def test_a_set_that_fails_says_how_much_more_and_another_reports() -> None:
    said: list[tuple[str, float, Any]] = []
    heads = made()
    limit = 1.05 * heads.predicted(heads.by_model(heads.total(0.15), 64))
    gated, _, best = passed(
        {"calibration": 1.0, "first": 1.5, "second": 1.5, "third": 1.0}, limit, said
    )
    judged = [(name, cost) for name, cost, numbers in said if numbers == [4]]
    assert [name for name, _ in judged] == ["first", "second"]
    # Where a task fails the others are not run, and chose nothing.
    assert [name for name, _, numbers in said if numbers == [0, 1, 2, 3]] == ["second"]
    assert (
        gated.chosen_on == [One("prose", "first")]
        and len(gated.reported_on) == 5
        and gated.held_out
    )
    assert gated.chosen.allocation.cost == judged[-1][1] > best.cost
    # One step comes to what is aimed at: little less than the limit.
    assert 0.5 < 1.5 * heads.predicted(gated.chosen.allocation) / limit <= 0.91


def test_calibration_prompts_raise_it_first_and_no_held_out_set_is_spent_on_that() -> None:
    said: list[tuple[str, float, Any]] = []
    heads = made()
    limit = 0.7 * heads.predicted(heads.by_model(heads.total(0.15), 64))
    gated, _, best = passed({"calibration": 1.0, "first": 0.5}, limit, said)
    assert (
        said[0][0] == "first" and gated.chosen.allocation.cost > best.cost and gated.chosen_on == []
    )
    assert (gated.fault or "").startswith("any: KL to dense attention is ")


def test_without_another_set_the_one_that_chose_reports_and_is_not_held_out() -> None:
    heads = made()
    limit = 1.05 * heads.predicted(heads.by_model(heads.total(0.15), 64))
    gated, _, _ = passed({"calibration": 1.0, "first": 1.5}, limit)
    assert gated.chosen_on == [gated.reported_on[4]] and not gated.held_out


def test_all_sets_that_failed_are_named() -> None:
    heads = made()
    limit = 1.05 * heads.predicted(heads.by_model(heads.total(0.15), 64))
    factors = {"calibration": 1.0, "first": 1.5, "second": 3.0, "third": 1.0}
    gated, _, _ = passed(factors, limit)
    assert gated.chosen_on == [One("prose", "first"), One("prose", "second")]
    assert gated.held_out and gated.reported_on == Prompts("third").sequences


def test_all_answers_together_fail_where_each_task_passes() -> None:
    """Of ten answers in each of four contexts every other one loses three: by itself that may be
    chance."""

    def of(task: str) -> TaskLoss:
        contexts = [
            ContextLoss(
                digest=f"{task}{at}",
                kl=0.01,
                answers=10,
                dense_right=10,
                tokens=10,
                lost=at % 2 * 3,
            )
            for at in range(4)
        ]
        return TaskLoss.of(task, contexts)

    heads, sets = made(), iter([Prompts("first")])
    lost = {"facts": of("facts"), "prose": of("prose")}
    assert all(Limits().fault([task]) is None for task in lost.values())

    def measure(reference: Any, some: Sequence[Allocation], numbers: Any) -> list[list[TaskLoss]]:
        return [[lost[reference.sequences[numbers[0]].task]] for _ in some]

    gate = Gate(heads=heads, limits=Limits(), measure=measure, sets=sets)  # type: ignore[arg-type]
    best = heads.by_model(heads.total(0.15), 64)
    with pytest.raises(
        Finding, match=r"the gate: all answers: accuracy falls from 1\.00 to 0\.85 of 80"
    ):
        gate.run(heads.total(0.15), Trial(name="curves", allocation=best, tasks=(lost["facts"],)))


def test_what_never_passes_is_a_finding() -> None:
    with pytest.raises(
        Finding, match=r"the gate: any: KL to dense attention is .* times the budget; ask for a"
    ):
        passed({"calibration": 1e9, "first": 1e9}, 1e-9)
