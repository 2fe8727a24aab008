"""Refinement: the weights of text and answers that one run of the whole model shows.

Curves take heads one at a time on dense inputs. A run with the patterns shows how far the loss of
each kind of prompt is from the sum of the curves, and so how the kinds weigh against each other."""

from __future__ import annotations

import numpy as np

from profiling.quality.sequences import Reference
from search.model.allocation import LARGEST_WEIGHT, Allocation, Heads
from search.model.search_run import Measured, SearchRun, add_trial
from search.study import Study


def refine(
    run: SearchRun, heads: Heads, total: float, calibration: Reference, study: Study
) -> Allocation:
    """Spend the budget with text and answers balanced by a run on the calibration prompts.

    Args:
        run: the search.
        heads: curves and costs.
        total: the budget.
        calibration: the prompts to measure on.
        study: gets the run as a trial.
    """
    tails = [tail for tail in sorted(heads.curves) if heads.least(tail) < total]
    # By the curves alone: the dense tail that loses least for the budget.
    by_curves = min((heads.allocate(total, tail) for tail in tails), key=heads.predicted)
    (measured,) = run.measure(calibration, [by_curves], name="refinement")
    add_trial(study, heads, measured, "calibration prompts")
    prompt_weights = balance(heads, measured)
    if prompt_weights is None:
        return by_curves
    return heads.allocate(total, by_curves.tail, prompt_weights=prompt_weights)


def balance(heads: Heads, measured: Measured) -> dict[str, float] | None:
    """Weights of the kinds of prompts with which the curves predict the measured losses.

    None with one kind."""
    predicted = heads.predicted_by_kind(measured.allocation)
    if len(predicted) < 2:
        return None
    losses = measured.by_kind
    factors = {kind: losses[kind] / max(loss, 1e-12) for kind, loss in predicted.items()}
    middle = float(np.exp(np.mean([np.log(max(factor, 1e-12)) for factor in factors.values()])))
    return {
        kind: float(np.clip(factor / middle, 1 / LARGEST_WEIGHT, LARGEST_WEIGHT))
        for kind, factor in factors.items()
    }
