"""Refinement around the closed-form answer, with losses by a formula in place of a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from search.model.allocation import Allocation, CostCurves
from search.model.limits import Limits
from search.model.losses import ContextLoss, loss_by_kind
from search.model.refine import balance, refine
from tests.search.model.made import FormulaRun, heads_of

TAILS = (0, 64)
FEW = heads_of(0, tails=TAILS)
TOTAL = 3.0
MANY = heads_of(5, tails=TAILS, heads=6, candidates=8)
DENSE = heads_of(5, tails=TAILS, heads=6, candidates=24, dense=True)
# Factors between the losses of the model and those of the curves.
TEXT = 1.5
ANSWER = 6.0
LIMITS = Limits()


def task(name: str, loss: float, *, answers: int = 0) -> ContextLoss:
    return ContextLoss(task=name, digest=name, kl=loss, answers=answers, tokens=answers)


def predicted(curves: CostCurves, allocation: Allocation) -> dict[str, float]:
    losses = curves.curves[allocation.tail].losses()
    return {kind: float(np.nansum(allocation.pick(loss))) for kind, loss in losses.items()}


def refined(
    curves: CostCurves, total: float | None, limits: Limits = LIMITS
) -> tuple[Allocation, FormulaRun]:
    """Refine with losses of text and answers at separate factors times the curves."""

    def formula(calibration: Any, allocation: Allocation, numbers: Any) -> list[ContextLoss]:
        losses = predicted(curves, allocation)
        return [
            task("prose", TEXT * losses["text"]),
            task("kv", ANSWER * losses["answer"], answers=3),
        ]

    run = FormulaRun(formula, heads=curves)
    return refine(cast(Any, run), cast(Any, None), limits=limits, budget=total), run


def test_balance_two_kinds_returns_ratio_of_run_to_curves():
    losses = predicted(FEW, FEW.allocate(TOTAL, 64))
    tasks = (
        task("prose", 2 * losses["text"]),
        task("more", 4 * losses["text"]),
        task("kv", 12 * losses["answer"], answers=2),
    )
    # Three times and twelve times: the geometric mean of both is 1.
    balanced = balance(losses, loss_by_kind(tasks))
    assert balanced == pytest.approx({"text": 0.5, "answer": 2.0})
    far = (task("prose", 1e-3 * losses["text"]), task("kv", 1e3 * losses["answer"], answers=2))
    assert balance(losses, loss_by_kind(far)) == {"text": 1 / 8, "answer": 8.0}


def test_balance_one_kind_returns_none():
    curves = {tail: replace(each, asked=0) for tail, each in FEW.curves.items()}
    text_only = replace(FEW, curves=curves)
    losses = text_only.predicted_by_kind(text_only.allocate(TOTAL, 64))
    assert balance(losses, loss_by_kind([task("prose", 1.0)])) is None


def test_refine_runs_the_curves_allocation_and_returns_the_balanced_one():
    total = MANY.total(0.15)
    allocation, run = refined(MANY, total)
    ((_, measured, _),) = run.measured
    ((added, losses, prompts),) = run.trials
    assert (added, prompts) == (measured, "calibration prompts") and len(losses) == 2
    by_tail = {tail: MANY.allocate(total, tail) for tail in TAILS}
    lost = {tail: MANY.predicted(each) for tail, each in by_tail.items()}
    assert measured.digest == by_tail[min(lost, key=lambda tail: lost[tail])].digest
    assert measured.prompt_weights == {"text": 1.0, "answer": 1.0}
    assert allocation.prompt_weights == pytest.approx({"text": 0.5, "answer": 2.0})
    assert allocation.digest != measured.digest and allocation.tail == measured.tail
    assert allocation.cost <= total * (1 + 1e-9)


@pytest.mark.parametrize("max_lost", [0.9, 0.3])
def test_refine_without_a_budget_aims_at_a_part_of_the_limits(max_lost):
    limits = Limits(max_lost=max_lost, max_perplexity=3.0)
    allocation, run = refined(DENSE, None, limits)
    ((_, measured, _),) = run.measured
    losses = predicted(DENSE, allocation)
    # 0.4 of the limit, at 0.65 of it lost for a nat a token; the run loses by factors more than the
    # curves say.
    assert ANSWER * losses["answer"] <= 0.4 * max_lost / 0.65 * (1 + 1e-9)
    assert TEXT * losses["text"] <= 0.4 * np.log(4) / 0.5 * (1 + 1e-9)
    # The run itself was of an allocation that knew only the curves, and is cheaper.
    assert measured.cost < allocation.cost


def test_refine_by_limits_that_nothing_meets_spends_all():
    allocation, _ = refined(DENSE, None, Limits(max_lost=1e-12, max_perplexity=1e-12))
    assert set(predicted(DENSE, allocation).values()) == {0.0}


def test_refine_without_gradients_starts_at_a_part_of_dense_attention():
    curves = {tail: replace(each, texts=0, asked=0) for tail, each in MANY.curves.items()}
    plain = replace(MANY, curves=curves)

    def formula(calibration: Any, allocation: Allocation, numbers: Any) -> list[ContextLoss]:
        return [task("prose", 0.5), task("kv", 0.5, answers=3)]

    run = FormulaRun(formula, heads=plain)
    allocation = refine(cast(Any, run), cast(Any, None), limits=LIMITS, budget=None)
    ((_, measured, _),) = run.measured
    assert measured.cost <= plain.total(0.35) * 1.3 and allocation.cost > measured.cost
