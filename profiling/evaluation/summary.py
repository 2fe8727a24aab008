"""Estimates from the rows of an evaluation, each with interval and difference to dense."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
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
from profiling.evaluation.rows import MEASURES, PERPLEXITY, SCORE, Row

ALL = "all answers"
BASELINE = "dense"
# The least difference that a verdict may have: sums in another order are another number.
_SHOWN = 5e-4


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A measure of one method on one task at one length, with a 95% interval over `count` units.

    A unit is a context with all its questions, a window of a text, or the same thing at every
    depth: never a token. Prompts that share a text are one unit.

    Attributes:
        low, high: bounds of the value's interval; None where one unit has none.
        difference, difference_low, difference_high: mean of method - dense over the same units; of
            a perplexity, its ratio to dense's less 1. None for dense, and where dense was not run;
            the bounds also where one unit has none.
        questions: asked in those units, or windows of a text.
        needed: units that tell a loss of 5 points in 80% of runs, by the spread of the difference;
            of scores alone.
        p: of the difference, by sign_flip.
        corrected: Holm-corrected over all comparisons of the evaluation.
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
    low: float | None
    high: float | None
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

    @property
    def mark(self) -> str:
        """The verdict, or "few" for too few prompts; "" otherwise."""
        return self.verdict or ("few" if self.few else "")


# Rows by method.
_Methods = dict[str, list[Row]]


def summarize(rows: Sequence[Row]) -> list[Estimate]:
    """Estimate every measure; answers of all tasks together as well, where there are several."""
    places = _by_place(rows)
    estimates = []
    for (task, length), methods in places.items():
        estimates += _of_task(task, length, methods)
    for length in dict.fromkeys(length for _, length in places):
        answered = {
            task: methods
            for (task, other), methods in places.items()
            if other == length and all(_is_answered(own) for own in methods.values())
        }
        if len(answered) > 1:
            estimates += _of_task(ALL, length, _pooled(answered))
    return _with_verdicts(estimates)


def _by_place(rows: Sequence[Row]) -> dict[tuple[str, int], _Methods]:
    """Group rows by task and length, then by method."""
    places: dict[tuple[str, int], _Methods] = {}
    for row in rows:
        methods = places.setdefault((row.task, row.length), {})
        methods.setdefault(row.method, []).append(row)
    return places


def _is_answered(rows: Sequence[Row]) -> bool:
    """True if every prompt has a score."""
    prompts = {row.prompt for row in rows}
    return len(prompts) == sum(row.measure == SCORE for row in rows)


def _pooled(tasks: Mapping[str, _Methods]) -> _Methods:
    """Join the rows of all tasks, of methods that ran on all of them: means of others differ."""
    names = dict.fromkeys(name for methods in tasks.values() for name in methods)
    return {
        name: [row for methods in tasks.values() for row in methods[name]]
        for name in names
        if all(name in methods for methods in tasks.values())
    }


def _of_task(task: str, length: int, methods: _Methods) -> list[Estimate]:
    estimates = []
    for measure in MEASURES:
        values = {method: _values(rows, measure) for method, rows in methods.items()}
        base = values.get(BASELINE, {})
        for method, own in values.items():
            if not own:
                continue
            other = None
            by_seed: tuple[float, ...] = ()
            if method != BASELINE and own.keys() <= base.keys():
                other = [base[unit] for unit in own]
                seeds = {row.unit: row.seed for row in methods[method]}
                by_seed = _by_seed(own, base, seeds, measure)
            questions = {(row.task, row.prompt): row.questions for row in methods[method]}
            estimates.append(
                Estimate(
                    task=task,
                    length=length,
                    method=method,
                    measure=measure,
                    questions=sum(questions.values()),
                    by_seed=by_seed,
                    **_estimated(measure, list(own.values()), other),
                )
            )
    return estimates


def _values(rows: Sequence[Row], measure: str) -> dict[str, float]:
    """The mean of each unit; nothing if a prompt lacks the measure."""
    prompts = {(row.task, row.prompt) for row in rows}
    own = [row for row in rows if row.measure == measure]
    if len(own) < len(prompts):
        return {}
    units: dict[str, list[float]] = {}
    for row in own:
        units.setdefault(row.unit, []).append(row.value)
    return {unit: float(np.mean(values)) for unit, values in units.items()}


def _by_seed(
    own: Mapping[str, float], base: Mapping[str, float], seeds: Mapping[str, int], measure: str
) -> tuple[float, ...]:
    """The mean difference of each seed's units; nothing of one seed alone."""
    differences: dict[int, list[float]] = {}
    for unit, value in own.items():
        differences.setdefault(seeds[unit], []).append(value - base[unit])
    if len(differences) < 2:
        return ()
    means = [float(np.mean(differences[seed])) for seed in sorted(differences)]
    if MEASURES[measure].kind == "perplexity":
        means = [math.expm1(mean) for mean in means]
    return tuple(means)


def _estimated(measure: str, own: Sequence[float], base: Sequence[float] | None) -> dict[str, Any]:
    """Compute an estimate's numbers from the values of its units, and dense attention's."""
    kind = MEASURES[measure].kind
    if kind == "score":
        interval = mean_interval(own)
    else:
        interval = student(own)
    if kind == "divergence":
        # No divergence is below 0.
        interval = replace(interval, low=max(interval.low, 0.0))
    if kind == "perplexity":
        interval = _transformed(interval, math.exp)
    numbers: dict[str, Any] = {
        "value": interval.value,
        **_bounds(interval, "low", "high"),
        "count": interval.count,
    }
    if base is None:
        return numbers
    difference = paired_difference(own, base)
    pairs = [a - b for a, b in zip(own, base, strict=True)]
    if kind == "perplexity":
        difference = _transformed(difference, math.expm1)
    needed = None
    if measure == SCORE and len(pairs) > 1:
        needed = prompts_needed(pairs)
    return {
        **numbers,
        "difference": difference.value,
        **_bounds(difference, "difference_low", "difference_high"),
        "needed": needed,
        "p": sign_flip(pairs),
    }


def _bounds(interval: Interval, *names: str) -> dict[str, float | None]:
    """The bounds under these names; None where one unit has none."""
    bounds: tuple[float | None, ...] = (interval.low, interval.high)
    if not interval.is_known:
        bounds = (None, None)
    return dict(zip(names, bounds, strict=True))


def _transformed(interval: Interval, function: Callable[[float], float]) -> Interval:
    return Interval(
        function(interval.value), function(interval.low), function(interval.high), interval.count
    )


def _with_verdicts(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Add verdicts, corrected over all comparisons."""
    tested = [at for at, estimate in enumerate(estimates) if estimate.p is not None]
    p_values = [estimates[at].p or 0.0 for at in tested]
    ordered = sorted(p_values)
    judged = list(estimates)
    for at, p in zip(tested, holm(p_values), strict=True):
        estimate = estimates[at]
        difference = estimate.difference or 0.0
        verdict = ""
        if p < 1 - CONFIDENCE and abs(difference) >= _SHOWN:
            more_is_better = MEASURES[estimate.measure].kind == "score"
            if (difference > 0) == more_is_better:
                verdict = "better"
            else:
                verdict = "worse"
        # The smallest p possible with this number of units, at its rank among the comparisons.
        smallest = 2.0 ** (1 - estimate.count)
        few = (len(ordered) - bisect_left(ordered, smallest)) * smallest >= 1 - CONFIDENCE
        judged[at] = replace(estimate, corrected=p, verdict=verdict, few=not verdict and few)
    return judged


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


def curves(rows: Sequence[Row]) -> list[Curve]:
    """Perplexity by position for each text, length and method that has it."""
    result = []
    for (task, length), methods in _by_place(rows).items():
        for method, own in methods.items():
            texts = [row for row in own if row.measure == PERPLEXITY]
            if texts:
                # Windows of one length have the same blocks.
                mean = np.exp(np.mean([row.blocks for row in texts], axis=0))
                tokens = texts[0].block_tokens
                starts = accumulate(tokens[:-1], initial=0)
                result.append(
                    Curve(
                        task=task,
                        length=length,
                        method=method,
                        positions=tuple(
                            start + size // 2 for start, size in zip(starts, tokens, strict=True)
                        ),
                        perplexity=tuple(mean.tolist()),
                    )
                )
    return result


@dataclass(frozen=True, kw_only=True)
class GridCell:
    """Mean score of a method where the needle lies at a depth, in prompts of one length."""

    method: str
    length: int
    depth: float
    score: float
    count: int


def grid(rows: Sequence[Row]) -> list[GridCell]:
    """The needle in a haystack, by length and depth."""
    scores: dict[tuple[str, int, float, str], list[float]] = {}
    for row in rows:
        if row.depth is not None and row.measure == SCORE:
            place = (row.task, row.length, row.depth, row.method)
            scores.setdefault(place, []).append(row.value)
    return [
        GridCell(
            method=method,
            length=length,
            depth=depth,
            score=float(np.mean(values)),
            count=len(values),
        )
        for (_, length, depth, method), values in scores.items()
    ]
