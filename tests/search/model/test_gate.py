"""The gate's rounds, with losses by a formula in place of a model: who judges, who reports, and what is beside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from artifacts import Finding
from search.model.allocation import Allocation, Heads
from search.model.gate import Gate, Gated
from search.model.refine import Trial
from search.model.task_losses import Limits, TaskLoss
from tests.search.model.made import heads_of

TAILS = (0, 64, 256)


@dataclass(frozen=True)
class Prompts:
    """In place of a reference: what tells one set of sequences from another."""

    sequences: str


def lost(heads: Heads, one: Allocation, factor: float) -> tuple[TaskLoss, ...]:
    none = {"perplexity": None, "nll": None, "nll_low": 0.0, "nll_high": 0.0, "dense_right": 0, "lost": 0, "won": 0}
    return (TaskLoss(task="prose", sequences=1, kl=factor * heads.predicted(one), answers=0, **none),)


def passed(factors: Mapping[str, float], limit: float, said: list[tuple[str, int]]) -> tuple[Gated, Heads, Allocation]:
    """What passes where each set loses so many times what the curves say; said: who measured how many."""
    heads = heads_of(0, tails=TAILS, heads=4, candidates=8)

    def measure(reference: Any, some: Sequence[Allocation], called: str) -> list[list[TaskLoss]]:
        said.append((reference.sequences, len(some)))
        return [list(lost(heads, one, factors[reference.sequences])) for one in some]

    held_out: Any = (Prompts(name) for name in factors if name != "calibration")
    gate = Gate(heads=heads, limits=Limits(kl=limit), measure=measure, sets=held_out, quiet=False)
    total = heads.total(0.15)
    best = heads.by_model(total, 64)
    trial = Trial(name="curves", allocation=best, tasks=lost(heads, best, factors["calibration"]))
    calibration: Any = Prompts("calibration")
    return gate.run(total, trial, calibration), heads, best


def test_what_passes_at_once_is_reported_on_the_first_held_out_set() -> None:
    said: list[tuple[str, int]] = []
    gated, heads, best = passed({"calibration": 1.0, "first": 1.1, "second": 1.0}, 100.0, said)
    assert gated.chosen.allocation.digest == best.digest
    assert (gated.chosen_on, gated.reported_on) == (None, "first")
    # Half and twice the budget, and of the other two dense tails the one that loses less by the curves.
    assert said[0] == ("first", 1) and {name for name, _ in said} == {"first"} and said[1][1] <= 3
    beside = [point.allocation for point in gated.points[1:]]
    total = heads.total(0.15)
    others = [heads.by_model(total, tail, weight=best.weight, kinds=best.kinds) for tail in (0, 256)]
    assert [one.digest for one in beside if one.tail != 64] == [min(others, key=heads.predicted).digest]
    assert all(point.tasks == lost(heads, point.allocation, 1.1) for point in gated.points)


def test_a_set_that_raises_the_budget_does_not_report() -> None:
    said: list[tuple[str, int]] = []
    heads = heads_of(0, tails=TAILS, heads=4, candidates=8)
    limit = 1.05 * heads.predicted(heads.by_model(heads.total(0.15), 64))
    gated, _, best = passed({"calibration": 1.0, "first": 1.5, "second": 1.0, "third": 1.0}, limit, said)
    assert gated.chosen.allocation.cost > best.cost
    assert (gated.chosen_on, gated.reported_on) == ("first", "second")
    assert "third" not in [name for name, _ in said]


def test_calibration_prompts_raise_it_first_and_no_held_out_set_is_spent_on_that(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said: list[tuple[str, int]] = []
    heads = heads_of(0, tails=TAILS, heads=4, candidates=8)
    limit = 0.7 * heads.predicted(heads.by_model(heads.total(0.15), 64))
    gated, _, best = passed({"calibration": 1.0, "first": 0.5}, limit, said)
    assert said[0] == ("calibration", 1) and gated.chosen.allocation.cost > best.cost
    assert (gated.chosen_on, gated.reported_on) == (None, "first")
    times = gated.chosen.allocation.cost / heads.total(0.15)
    assert capsys.readouterr().err.endswith(f"; with {times:.2f} times the budget it passes\n")


def test_what_never_passes_is_a_finding() -> None:
    with pytest.raises(Finding, match=r"the gate: prose: KL to dense attention is .* times the budget; ask for a"):
        passed({"calibration": 1e9, "first": 1e9}, 1e-9, [])
