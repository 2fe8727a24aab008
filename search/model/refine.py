"""Refinement: the weights of text and answers that one run of the whole model shows.

Curves take heads one at a time on dense inputs. A run with the patterns shows how far the loss of
each kind of prompt is from the sum of the curves, and so how the kinds weigh against each other.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from profiling.quality.sequences import Reference
from search.model.allocation import LARGEST_WEIGHT, Allocation
from search.model.losses import loss_by_kind
from search.model.run import SearchRun


def refine(run: SearchRun, calibration: Reference) -> Allocation:
    """Spend the budget with text and answers balanced by a run on the calibration prompts.

    Args:
        run: the search, with its heads and budget.
        calibration: the prompts to measure on.
    """
    heads = run.heads
    tails = [tail for tail in sorted(heads.curves) if heads.least(tail) < run.budget]
    # By the curves alone: the dense tail that loses least for the budget.
    by_curves = min((heads.allocate(run.budget, tail) for tail in tails), key=heads.predicted)
    (losses,) = run.measure(calibration, [by_curves], name="refinement")
    run.add_trial(by_curves, losses, "calibration prompts")
    prompt_weights = balance(heads.predicted_by_kind(by_curves), loss_by_kind(losses))
    if prompt_weights is None:
        return by_curves
    return heads.allocate(run.budget, by_curves.tail, prompt_weights=prompt_weights)


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
