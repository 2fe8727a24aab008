"""Refinement: the weights of text and answers, and the first budget, by a run of the whole model.

Curves take heads one at a time on dense inputs. A run with the patterns shows how far the loss of
each kind of prompt is from the sum of the curves: how the kinds weigh against each other, and at
which budget the loss is a part of its limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from profiling.quality.sequences import Reference
from search.model.acceptance import AIM
from search.model.allocation import LARGEST_WEIGHT, MARGIN, Allocation, CostCurves
from search.model.limits import Limits
from search.model.losses import loss_by_kind
from search.model.run import SearchRun

# Fraction of the correct answers that is lost, and relative rise of a text's perplexity, for each
# nat a token of loss. Measured: docs/internals.md.
_PER_NAT = {"answer": 0.65, "text": 0.5}
# Fraction of dense attention's cost where curves are without a scale, for lack of gradients.
_WITHOUT_SCALE = 0.35


def refine(
    run: SearchRun, calibration: Reference, *, limits: Limits, budget: float | None
) -> Allocation:
    """Balance text and answers by a run on the calibration prompts, and allocate a budget.

    Args:
        run: the search, with its curves and costs.
        calibration: the prompts to measure on.
        limits: by which the budget is chosen where there is none.
        budget: the total that was asked for; None where the limits choose it.
    """
    heads = run.heads
    if budget is None:
        by_curves = _by_limits(heads, limits)
    else:
        tails = [tail for tail in sorted(heads.curves) if heads.least(tail) < budget]
        # By the curves alone: the dense tail that loses least for the budget.
        by_curves = min((heads.allocate(budget, tail) for tail in tails), key=heads.predicted)
    (losses,) = run.measure(calibration, [by_curves], name="refinement")
    run.add_trial(by_curves, losses, "calibration prompts")
    predicted = heads.predicted_by_kind(by_curves)
    measured = loss_by_kind(losses)
    weights = balance(predicted, measured) or by_curves.prompt_weights
    if budget is not None:
        return heads.allocate(budget, by_curves.tail, prompt_weights=weights)
    targets = {}
    for kind, loss in predicted.items():
        # Curves without gradients are of one kind, whose loss is that of all prompts.
        nats = measured.get(kind, max(measured.values()))
        wanted = min(_nats(each, limits) for each in measured if kind in (each, "change"))
        targets[kind] = loss * wanted / max(nats, 1e-12)
    return heads.cheapest(targets, by_curves.tail, prompt_weights=weights)


def _by_limits(heads: CostCurves, limits: Limits) -> Allocation:
    """The cheapest allocation that loses a part of the limits by the curves alone."""
    tails = sorted(heads.curves)
    kinds = heads.curves[tails[0]].losses()
    if not _PER_NAT.keys() >= kinds.keys():
        total = max(heads.total(_WITHOUT_SCALE), heads.least(tails[0]) * MARGIN)
        return heads.allocate(total, tails[0])
    targets = {kind: _nats(kind, limits) for kind in kinds}
    allocations = [heads.cheapest(targets, tail) for tail in tails]
    return min(allocations, key=lambda allocation: allocation.cost)


def _nats(kind: str, limits: Limits) -> float:
    """The loss in nats a token at which a part of a kind's limit is lost."""
    if kind == "answer":
        limit = limits.max_lost
    else:
        limit = math.log1p(limits.max_perplexity)
    return AIM * limit / _PER_NAT[kind]


def balance(
    predicted: Mapping[str, float], measured: Mapping[str, float]
) -> dict[str, float] | None:
    """Weights of the kinds of prompts with which the curves predict the measured losses.

    None with one kind.
    """
    if len(predicted) < 2:
        return None
    factors = {kind: measured[kind] / max(loss, 1e-12) for kind, loss in predicted.items()}
    middle = float(np.exp(np.mean([np.log(max(factor, 1e-12)) for factor in factors.values()])))
    return {
        kind: float(np.clip(factor / middle, 1 / LARGEST_WEIGHT, LARGEST_WEIGHT))
        for kind, factor in factors.items()
    }
