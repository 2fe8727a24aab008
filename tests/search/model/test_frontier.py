"""Predicted losses of the points and of the frontier, from a verdict that a test writes down."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from artifacts import Verdict
from kernels.patterns import make
from search.model.frontier import frontier, loss_ratios
from search.model.losses import ContextLoss
from search.model.proof import Proof
from search.model.record import _points
from search.model.run import Round
from tests.search.model.made import heads_of

HEADS = heads_of(0, heads=12, candidates=24, dense=True)
ACCEPTED = HEADS.allocate(HEADS.total(0.3), 64)
SPENT = HEADS.share(ACCEPTED.cost)
OTHERS = [HEADS.reallocate(ACCEPTED, ACCEPTED.cost * factor) for factor in (0.5, 2.0)]


def run_of(**losses: float) -> Any:
    """A search whose accepted allocation has these losses."""
    verdict = Verdict(proven=True, max_lost=0.05, max_perplexity=0.03, **losses)
    proof = Proof(losses=(), verdict=verdict, fault=None, ratios={})
    accepted = Round(name="round 1", allocation=ACCEPTED, proof=proof, references=())
    measured = [
        (allocation, [ContextLoss(task="facts", digest="0", kl=0.1 / allocation.cost)])
        for allocation in (ACCEPTED, *OTHERS)
    ]
    return SimpleNamespace(
        heads=HEADS,
        allocation=ACCEPTED,
        accepted=accepted,
        rounds=[accepted],
        spent=SPENT,
        points=measured,
        prefills={},
        attention={},
        candidates=[make("a_shape", sink=64, window=64 * (1 + at)) for at in range(24)],
        density=lambda tail: HEADS.curves[tail].tiles,
    )


@pytest.mark.parametrize("high", [-0.02, 0.0, 0.03, 0.9])
def test_cheaper_point_loses_no_less_than_the_proven_one(high):
    run = run_of(lost=high - 0.02, lost_high=high)
    points, _ = _points(run)
    cheap, accepted, dear = points
    assert accepted.layers is None and accepted.lost == high
    assert cheap.lost >= accepted.lost and cheap.lost >= 0
    assert dear.lost >= 0
    if high > 0:
        ratios = [loss_ratios(run, each.candidates)["answer"] for each in OTHERS]
        assert [cheap.lost, dear.lost] == pytest.approx(
            [min(high * ratio, 1.0) for ratio in ratios]
        )
        assert dear.lost < high < cheap.lost


def test_cheaper_point_of_a_smaller_predicted_loss_has_the_proven_bound(monkeypatch):
    """Costs differ between kinds of patterns, so one kind of loss may fall with the budget."""
    run = run_of(lost=0.01, lost_high=0.03)
    monkeypatch.setattr(
        "search.model.record.loss_ratios", lambda run, candidates: {"text": 0.5, "answer": 0.5}
    )
    points, _ = _points(run)
    assert [point.lost for point in points] == [0.03, 0.03, 0.015]


@pytest.mark.parametrize("lost", [-0.05, 0.0, 0.01])
@pytest.mark.parametrize("perplexity", [-0.02, 0.002])
def test_frontier_predicts_no_gain_of_a_smaller_budget(lost, perplexity):
    run = run_of(
        lost=lost, lost_high=lost + 0.01, perplexity=perplexity, perplexity_high=perplexity + 0.001
    )
    points = frontier(run)
    assert [point.spent for point in points] == sorted(point.spent for point in points)
    cheaper = [point for point in points if point.spent < SPENT and not point.measured]
    dearer = [point for point in points if point.spent > SPENT and not point.measured]
    assert cheaper and dearer
    for point in cheaper:
        assert point.lost >= max(lost, 0) and point.perplexity >= max(perplexity, 0)
    for point in dearer:
        assert point.lost >= 0 and point.perplexity >= 0
