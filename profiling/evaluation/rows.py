"""Figures of an evaluation from its records, each with interval and difference to dense."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from profiling.evaluation.intervals import (
    CONFIDENCE,
    Interval,
    holm,
    mean_interval,
    paired_difference,
    prompts_needed,
    sign_flip,
    student,
)
from profiling.evaluation.measure import QUESTIONS, SEED, UNIT, Outcome, groups
from profiling.quality.trials import BLOCK, FORCED

ALL = "all answers"
BASELINE = "dense"
SCORE = "score"
ACCURACY = "token accuracy"
NLL = "nll of the answer"
PERPLEXITY = "perplexity"
DECODED = f"perplexity, last {FORCED} tokens"
KL = "KL to dense"
# Whether more of it is better.
MEASURES = {
    SCORE: True,
    ACCURACY: True,
    NLL: False,
    PERPLEXITY: False,
    DECODED: False,
    KL: False,
}
_FIELDS = {
    SCORE: "score",
    ACCURACY: "token_accuracy",
    NLL: "nll",
    PERPLEXITY: "blocks",
    DECODED: "forced",
    KL: "kl",
}
_PERPLEXITIES = (PERPLEXITY, DECODED)
# From 0 to 1.
_SCORES = (SCORE, ACCURACY)
_SHOWN = 5e-4


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measure of one method on one task at one length, with a 95% interval over `count` units.

    A unit is a context with all its questions, a window of a text, or the same thing at every
    depth: never a token.

    Attributes:
        difference, difference_low, difference_high: mean of method - dense over the same units; of
            a perplexity, its ratio to dense's less 1. None for dense, and where dense was not run.
        questions: asked in those units, or windows of a text.
        needed: units that tell a loss of 5 points in 80% of runs, by the spread of the difference;
            of scores alone.
        p: of the difference, by sign_flip.
        corrected: Holm-corrected over all comparisons of the page.
        verdict: "better" or "worse" than dense where the corrected p is below 0.05 and the
            difference shows in three decimals, "" otherwise.
        few: too few units for any verdict.
        by_seed: the difference of each seed's prompts alone, where there are several.
    """

    task: str
    length: int
    method: str
    measure: str
    value: float
    low: float
    high: float
    count: int
    questions: int = 0
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    needed: int | None = None
    p: float | None = None
    corrected: float | None = None
    verdict: str = ""
    few: bool = False
    by_seed: tuple[float, ...] = ()


def figures(outcomes: Sequence[Outcome]) -> list[Figure]:
    """All figures; answers of all tasks together as well, where there are several."""
    all_figures = []
    pooled = dict[int, dict[str, list[dict[str, Any]]]]()
    answered: dict[int, set[str]] = {}
    asked: dict[tuple[int, str], set[str]] = {}
    for task, length, methods in groups(outcomes):
        all_figures += _of_task(task, length, methods)
        if all("score" in record for records in methods.values() for record in records):
            answered.setdefault(length, set()).add(task)
            for method, records in methods.items():
                pooled.setdefault(length, {}).setdefault(method, []).extend(records)
                asked.setdefault((length, method), set()).add(task)
    for length, methods in pooled.items():
        # A method that was not asked all of them would have the mean of other tasks.
        whole = {
            name: records
            for name, records in methods.items()
            if asked[length, name] == answered[length]
        }
        if len(answered[length]) > 1:
            all_figures += _of_task(ALL, length, whole)
    return _marked(all_figures)


def _marked(all_figures: Sequence[Figure]) -> list[Figure]:
    """The figures with their verdicts, corrected over all comparisons of the page."""
    tested = [at for at, figure in enumerate(all_figures) if figure.p is not None]
    corrected = holm([all_figures[at].p or 0.0 for at in tested])
    ordered = sorted(all_figures[at].p or 0.0 for at in tested)
    marked = list(all_figures)
    for at, p in zip(tested, corrected, strict=True):
        difference = all_figures[at].difference or 0.0
        # Sums in another order are another number, and always on the same side.
        apart = p < 1 - CONFIDENCE and abs(difference) >= _SHOWN
        better = (difference > 0) == MEASURES[all_figures[at].measure]
        if apart:
            if better:
                verdict = "better"
            else:
                verdict = "worse"
        else:
            verdict = ""
        # The least p that so many units can have, where it would stand among the comparisons.
        least = 2.0 ** (1 - all_figures[at].count)
        few = (len(ordered) - bisect_left(ordered, least)) * least >= 1 - CONFIDENCE
        marked[at] = replace(all_figures[at], corrected=p, verdict=verdict, few=not verdict and few)
    return marked


def _of_task(task: str, length: int, methods: dict[str, list[dict[str, Any]]]) -> list[Figure]:
    all_figures = []
    for measure in MEASURES:
        values = {method: _values(records, measure) for method, records in methods.items()}
        base = values.get(BASELINE, {})
        for method, own in values.items():
            if not own:
                continue
            paired = method != BASELINE and own.keys() <= base.keys()
            if paired:
                other = [base[unit] for unit in own]
            else:
                other = None
            made = _figure(task, length, method, measure, list(own.values()), other)
            seeds = {record[UNIT]: record[SEED] for record in methods[method]}
            if paired:
                apart = _by_seed(own, base, seeds, measure)
            else:
                apart = ()
            questions = sum(record[QUESTIONS] for record in methods[method])
            all_figures.append(replace(made, by_seed=apart, questions=questions))
    return all_figures


def _by_seed(
    own: dict[Any, float], base: dict[Any, float], seeds: dict[Any, int], measure: str
) -> tuple[float, ...]:
    """The mean difference of each seed's units; nothing of one seed alone."""
    apart: dict[int, list[float]] = {}
    for unit, value in own.items():
        apart.setdefault(seeds[unit], []).append(value - base[unit])
    if len(apart) < 2:
        return ()
    means = [float(np.mean(apart[seed])) for seed in sorted(apart)]
    return tuple(math.expm1(mean) if measure in _PERPLEXITIES else mean for mean in means)


def _values(records: Sequence[dict[str, Any]], measure: str) -> dict[Any, float]:
    """One number a unit; nothing where any prompt has none."""
    units: dict[Any, list[float]] = {}
    for record in records:
        value = record.get(_FIELDS[measure])
        if value is None:
            return {}
        units.setdefault(record[UNIT], []).append(float(np.mean(value)))
    return {unit: float(np.mean(values)) for unit, values in units.items()}


def _figure(
    task: str,
    length: int,
    method: str,
    measure: str,
    own: Sequence[float],
    base: Sequence[float] | None,
) -> Figure:
    perplexity = measure in _PERPLEXITIES
    if measure in _SCORES:
        interval = mean_interval(own)
    else:
        interval = student(own)
    if measure == KL:
        # No divergence is below 0.
        interval = replace(interval, low=max(interval.low, 0.0))
    if perplexity:
        estimate = _through(interval, math.exp)
    else:
        estimate = interval
    made = Figure(
        task=task,
        length=length,
        method=method,
        measure=measure,
        value=estimate.value,
        low=estimate.low,
        high=estimate.high,
        count=estimate.count,
    )
    if base is None:
        return made
    difference = paired_difference(own, base)
    apart = [a - b for a, b in zip(own, base, strict=True)]
    if perplexity:
        difference = _through(difference, math.expm1)
    if measure == SCORE and len(apart) > 1:
        needed = prompts_needed(apart)
    else:
        needed = None
    return replace(
        made,
        difference=difference.value,
        difference_low=difference.low,
        difference_high=difference.high,
        needed=needed,
        p=sign_flip(apart),
    )


def _through(interval: Interval, function: Callable[[float], float]) -> Interval:
    return Interval(
        function(interval.value), function(interval.low), function(interval.high), interval.count
    )


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Perplexity of a text by position.

    Attributes:
        positions: the middle of each block of tokens.
    """

    task: str
    length: int
    method: str
    positions: tuple[int, ...]
    perplexity: tuple[float, ...]


def curves(outcomes: Sequence[Outcome]) -> list[Curve]:
    """Perplexity by position for each text, length and method that has it."""
    all_curves = []
    for task, length, methods in groups(outcomes):
        for method, records in methods.items():
            blocks = [record["blocks"] for record in records if record.get("blocks")]
            if blocks:
                mean = np.exp(np.mean(blocks, axis=0))
                at = tuple(BLOCK * i + BLOCK // 2 for i in range(len(mean)))
                all_curves.append(
                    Curve(
                        task=task,
                        length=length,
                        method=method,
                        positions=at,
                        perplexity=tuple(mean.tolist()),
                    )
                )
    return all_curves


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Mean score of a method where the needle lies at a depth, in prompts of one length."""

    method: str
    length: int
    depth: float
    score: float
    count: int


def grid(outcomes: Sequence[Outcome]) -> list[Cell]:
    """The needle in a haystack, by length and depth."""
    return [
        Cell(
            method=outcome.method,
            length=outcome.length,
            depth=outcome.depth,
            score=float(np.mean([record["score"] for record in outcome.records])),
            count=len(outcome.records),
        )
        for outcome in outcomes
        if outcome.depth is not None
    ]
