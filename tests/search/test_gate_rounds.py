"""Held-out prompts choose the point that is served, and heads are given more until it passes, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from artifacts import HeadwiseError
from kernels.patterns import make
from profiling.quality.logits import Drift
from search.curves import Curves
from search.gate import Limits
from search.gate_rounds import Judges, Raised, raise_until
from search.settle import Settlement
from tests.search.problems import Formula, problem_of

CANDIDATES = (*(make("block_sparse", blocks=blocks) for blocks in (2, 4, 8, 16)), make("dense"))
COSTS = np.tile(np.array([1.0, 2.0, 4.0, 8.0, 16.0]), (4, 5, 1))
CHANGE = np.tile(np.array([16.0, 8.0, 4.0, 2.0, 0.0]), (4, 5, 1))


def curves_of(change: np.ndarray = CHANGE) -> Curves:
    return Curves(change=change, error=change, recall=1 - change / 32, tiles=COSTS)


@pytest.fixture
def problem() -> Formula:
    return problem_of(curves_of(), COSTS, total=40.0, candidates=CANDIDATES)


def by_cost(settlement: Settlement) -> tuple[float, float]:
    return 4 / settlement.cost, 1.0


def judges(problem: Formula, model: Any, *curves: Curves) -> Iterator[Judges]:
    """A set of prompts for each of the curves; the number of the set stands for its prompts."""
    for number, each in enumerate(curves):

        def drifts(settlements: Sequence[Settlement], number: int = number) -> list[Drift]:
            return [problem.drift(model, number, settlement) for settlement in settlements]

        yield Judges(prompts=number, drifts=drifts, curves=lambda each=each: each)  # type: ignore[arg-type,misc]


def raised(problem: Formula, model: object, limits: Limits, *curves: Curves) -> Raised:
    settlements = [problem.settle({"share": share}) for share in (0.5, 0.7, 1.0, 1.4, 2.0)]
    return raise_until(problem, settlements, judges(problem, model, *(curves or (problem.curves,))), limits)


def test_the_best_point_that_the_budget_pays_for_is_served(problem: Formula) -> None:
    found = raised(problem, by_cost, Limits(kl=1.0))
    assert found.rounds == 0 and found.chosen.settlement.cost == 40.0
    assert [point.settlement.cost for point in found.points] == [20.0, 28.0, 40.0, 56.0, 80.0]


def test_points_that_are_no_better_leave_the_front(problem: Formula) -> None:
    def model(settlement: Settlement) -> tuple[float, float]:
        return (0.2 if 28 <= settlement.cost <= 56 else 4 / settlement.cost), 1.0

    found = raised(problem, model, Limits(kl=1.0))
    costs, kls = zip(*((p.settlement.cost, p.drift.mean_kl) for p in found.points), strict=True)
    assert costs == (20.0, 80.0) and kls == pytest.approx((0.2, 0.05))


def test_more_is_given_until_it_passes(problem: Formula) -> None:
    found = raised(problem, by_cost, Limits(kl=0.06))
    assert found.rounds > 1 and found.chosen.drift.mean_kl <= 0.06
    assert found.fault is not None and not found.judges.fresh
    # A round before it was not enough.
    assert 4 / (found.chosen.settlement.cost / 1.15 - 2) > 0.06
    assert found.chosen in found.points


def test_perplexity_is_a_limit_of_its_own(problem: Formula) -> None:
    found = raised(problem, lambda s: (0.001, 1 + 4 / s.cost), Limits(drop=0.06))
    assert found.rounds > 1 and found.chosen.drift.perplexity_ratio <= 1.06


def test_the_heads_that_held_out_prompts_show_to_be_worst_get_more(problem: Formula) -> None:
    change = CHANGE.copy()
    change[2, 3] *= 50
    asked = []

    def model(settlement: Settlement) -> tuple[float, float]:
        asked.append(settlement)
        return (0.01 if settlement.chosen[2, 3] == 4 else 1.0), 1.0

    found = raised(problem, model, Limits(), curves_of(change))
    # The same total already does when it is spent by what was held out.
    assert found.rounds == 1 and found.chosen.settlement.cost <= 40.0
    assert found.chosen.settlement.chosen[2, 3] == 4 and (asked[2].chosen[2, 3] < 4)


def test_what_decided_does_not_judge(problem: Formula) -> None:
    """The next prompts do, and where they find fault as well, those after them."""
    by_judge: list[tuple[int, float]] = []

    class Judged(Formula):
        def drift(self, model: object, logits: int, settlement: Settlement, **_: object) -> Drift:
            by_judge.append((logits, settlement.cost))
            # The second set asks for more than the first, and is content with that.
            return super().drift(lambda s: ((4, 6, 5)[logits] / s.cost, 1.0), logits, settlement)

    judged = Judged(**{field.name: getattr(problem, field.name) for field in fields(problem)})
    found = raised(judged, None, Limits(kl=0.06), *[problem.curves] * 3)
    assert found.judges.prompts == 2 and found.judges.fresh  # type: ignore[comparison-overlap]
    assert found.chosen.drift.mean_kl == 5 / found.chosen.settlement.cost <= 0.06
    # 4 / 0.06 is enough for the first, 6 / 0.06 for the second, within a step.
    assert 100 <= found.chosen.settlement.cost < 100 * 1.15 + 2
    assert {logits for logits, _ in by_judge} == {0, 1, 2}
    # The front is the third set's too.
    assert all(point.drift.mean_kl == 5 / point.settlement.cost for point in found.points)


def test_where_no_judges_are_left_the_last_ones_figures_are_told(problem: Formula) -> None:
    class Judged(Formula):
        def drift(self, model: object, logits: int, settlement: Settlement, **_: object) -> Drift:
            return super().drift(lambda s: ((4, 6)[logits] / s.cost, 1.0), logits, settlement)

    judged = Judged(**{field.name: getattr(problem, field.name) for field in fields(problem)})
    found = raised(judged, None, Limits(kl=0.06), *[problem.curves] * 2)
    assert found.chosen.drift.mean_kl <= 0.06 and not found.judges.fresh
    assert found.judges.prompts == 1  # type: ignore[comparison-overlap]
    assert found.chosen in found.points
    assert all(point.drift.mean_kl == 6 / point.settlement.cost for point in found.points)


def test_all_of_attention_is_tried_and_then_it_fails_loudly(problem: Formula) -> None:
    tried: list[float] = []

    def model(settlement: Settlement) -> tuple[float, float]:
        tried.append(settlement.cost)
        return 1.0, 1.0

    with pytest.raises(HeadwiseError, match=r"the gate: on held-out prompts KL to dense attention is 1\.0000") as error:
        raised(problem, model, Limits())
    assert "\n" not in str(error.value) and "times the budget" in str(error.value)
    assert max(tried) > 4 * 40.0
    small = problem_of(problem.curves, COSTS, total=240.0, candidates=CANDIDATES)
    tried.clear()
    with pytest.raises(HeadwiseError, match=r"with 1\.33 times the budget"):
        raised(small, model, Limits())
    assert max(tried) == COSTS.max(-1).sum() == 320.0


def test_numbers_that_are_none_do_not_pass() -> None:
    nan = np.array([np.nan])
    assert Limits().fault(Drift(kl=nan, loss=nan, dense_loss=nan)) is not None


def test_limits_must_be_above_0() -> None:
    with pytest.raises(HeadwiseError, match=r"--max-kl must be above 0, got -1"):
        Limits(kl=-1)
    with pytest.raises(HeadwiseError, match=r"--max-drop must be above 0, got nan"):
        Limits(drop=float("nan"))
