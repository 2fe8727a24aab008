"""From the records of an evaluation to its figures, each with its interval and how far it is from dense attention."""

from __future__ import annotations

import math
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
from profiling.evaluation.measure import UNIT, Outcome, groups
from profiling.quality.trials import BLOCK, FORCED

ALL = "all answers"
BASELINE = "dense"
SCORE, ACCURACY, NLL, CHOICE = "score", "token accuracy", "nll of the answer", "forced choice"
PERPLEXITY, DECODED = "perplexity", f"perplexity, last {FORCED} tokens"
COPIES = "nll of far copies"
# Whether more of it is better.
MEASURES = {SCORE: True, CHOICE: True, ACCURACY: True, NLL: False, PERPLEXITY: False, DECODED: False, COPIES: False}
_FIELDS = {
    SCORE: "score",
    CHOICE: "choice",
    ACCURACY: "token_accuracy",
    NLL: "nll",
    PERPLEXITY: "blocks",
    DECODED: "forced",
    COPIES: "copies",
}
_PERPLEXITIES = (PERPLEXITY, DECODED)
# From 0 to 1.
_SCORES = (SCORE, CHOICE, ACCURACY)
_SHOWN = 5e-4


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measure of one method on one task at one length, with a 95% interval over `count` units.

    A unit is a context with all its questions, a window of a text, or the same thing at every depth: never a token.
    difference, and its bounds: the mean of method - dense over the same units; of a perplexity, its ratio to dense's
    less 1. None for dense, and where dense was not run.
    needed: how many units tell a loss of 5 points in 80% of runs, by the spread of that difference; of scores alone.
    p: of that difference, by sign_flip; corrected: after Holm's correction for all figures of the length and measure.
    verdict: "better" or "worse" than dense where the corrected p is below 0.05 and the difference shows in three
        decimals, "" otherwise.
    """

    task: str
    length: int
    method: str
    measure: str
    value: float
    low: float
    high: float
    count: int
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    needed: int | None = None
    p: float | None = None
    corrected: float | None = None
    verdict: str = ""


def figures(outcomes: Sequence[Outcome]) -> list[Figure]:
    """All figures; answers of all tasks together as well, where there are several."""
    found, pooled = [], dict[int, dict[str, list[dict[str, Any]]]]()
    answered: dict[int, int] = {}
    for task, length, methods in groups(outcomes):
        found += _of_task(task, length, methods)
        if all("score" in record for records in methods.values() for record in records):
            answered[length] = answered.get(length, 0) + 1
            for method, records in methods.items():
                pooled.setdefault(length, {}).setdefault(method, []).extend(records)
    for length, methods in pooled.items():
        if answered[length] > 1:
            found += _of_task(ALL, length, methods)
    return _judged(found)


def _judged(found: list[Figure]) -> list[Figure]:
    """With verdicts: the looks of a table, which are corrected together, are those at its length by its measure."""
    tables: dict[tuple[int, str], list[int]] = {}
    for at, figure in enumerate(found):
        if figure.p is not None:
            tables.setdefault((figure.length, figure.measure), []).append(at)
    judged = list(found)
    for places in tables.values():
        for at, corrected in zip(places, holm([found[at].p or 0.0 for at in places]), strict=True):
            difference = found[at].difference or 0.0
            # Sums in another order are another number, and always on the same side.
            apart = corrected < 1 - CONFIDENCE and abs(difference) >= _SHOWN
            better = (difference > 0) == MEASURES[found[at].measure]
            verdict = ("better" if better else "worse") if apart else ""
            judged[at] = replace(found[at], corrected=corrected, verdict=verdict)
    return judged


def _of_task(task: str, length: int, methods: dict[str, list[dict[str, Any]]]) -> list[Figure]:
    found = []
    for measure in MEASURES:
        values = {method: _values(records, measure) for method, records in methods.items()}
        base = values.get(BASELINE)
        for method, own in values.items():
            if own:
                other = None if method == BASELINE or not base or len(base) != len(own) else base
                found.append(_figure(task, length, method, measure, own, other))
    return found


def _values(records: Sequence[dict[str, Any]], measure: str) -> list[float]:
    """One number a unit; empty where any prompt has none, but for texts that copy nothing."""
    units: dict[Any, list[float]] = {}
    for at, record in enumerate(records):
        value = record.get(_FIELDS[measure])
        if value is None and measure == COPIES:
            continue
        if value is None:
            return []
        units.setdefault(record.get(UNIT, at), []).append(float(np.mean(value)))
    return [float(np.mean(values)) for values in units.values()]


def _figure(
    task: str, length: int, method: str, measure: str, own: Sequence[float], base: Sequence[float] | None
) -> Figure:
    perplexity = measure in _PERPLEXITIES
    interval = mean_interval(own) if measure in _SCORES else student(own)
    told = _through(interval, math.exp) if perplexity else interval
    made = Figure(
        task=task,
        length=length,
        method=method,
        measure=measure,
        value=told.value,
        low=told.low,
        high=told.high,
        count=told.count,
    )
    if base is None:
        return made
    difference = paired_difference(own, base)
    apart = [a - b for a, b in zip(own, base, strict=True)]
    if perplexity:
        difference = _through(difference, math.expm1)
    return replace(
        made,
        difference=difference.value,
        difference_low=difference.low,
        difference_high=difference.high,
        needed=prompts_needed(apart) if measure in (SCORE, CHOICE) and len(apart) > 1 else None,
        p=sign_flip(apart),
    )


def _through(interval: Interval, function: Callable[[float], float]) -> Interval:
    return Interval(function(interval.value), function(interval.low), function(interval.high), interval.count)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Perplexity of a text by position: of `positions[i]` on average, the middle of a block of tokens."""

    task: str
    length: int
    method: str
    positions: tuple[int, ...]
    perplexity: tuple[float, ...]


def curves(outcomes: Sequence[Outcome]) -> list[Curve]:
    """Perplexity by position for each text, length and method that has it."""
    found = []
    for task, length, methods in groups(outcomes):
        for method, records in methods.items():
            blocks = [record["blocks"] for record in records if record.get("blocks")]
            if blocks:
                mean = np.exp(np.mean(blocks, axis=0))
                at = tuple(BLOCK * i + BLOCK // 2 for i in range(len(mean)))
                found.append(
                    Curve(task=task, length=length, method=method, positions=at, perplexity=tuple(mean.tolist()))
                )
    return found


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
