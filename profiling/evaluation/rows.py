"""From the records of an evaluation to its figures, each with its interval and how far it is from dense attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from profiling.evaluation.intervals import Interval, bootstrap, differs, mean_interval, paired_difference
from profiling.evaluation.measure import Outcome, groups
from profiling.quality.trials import BLOCK, FORCED

ALL = "all answers"
BASELINE = "dense"
SCORE, ACCURACY, NLL = "score", "token accuracy", "nll of the answer"
PERPLEXITY, DECODED = "perplexity", f"perplexity, last {FORCED} tokens"
COPIES = "nll of far copies"
# Whether more of it is better.
MEASURES = {SCORE: True, ACCURACY: True, NLL: False, PERPLEXITY: False, DECODED: False, COPIES: False}
_FIELDS = {
    SCORE: "score",
    ACCURACY: "token_accuracy",
    NLL: "nll",
    PERPLEXITY: "blocks",
    DECODED: "forced",
    COPIES: "copies",
}
_PERPLEXITIES = (PERPLEXITY, DECODED)
_SHOWN = 5e-4


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measure of one method on one task at one length, with a 95% interval of `count` prompts, or blocks of a text.

    difference, and its bounds: the mean of method - dense over the same prompts; of a perplexity, its ratio to dense's
    less 1. None for dense, and where dense was not run.
    verdict: "better" or "worse" than dense where 0 is outside these bounds and the difference shows in three decimals,
        "" otherwise.
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
    return found


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
    """One number a prompt, or a block of a text; empty where any prompt has none, but for texts that copy nothing."""
    values: list[float] = []
    for record in records:
        value = record.get(_FIELDS[measure])
        if value is None and measure == COPIES:
            continue
        if value is None:
            return []
        values += value if isinstance(value, list) else [value]
    return values


def _figure(
    task: str, length: int, method: str, measure: str, own: Sequence[float], base: Sequence[float] | None
) -> Figure:
    perplexity = measure in _PERPLEXITIES
    interval = mean_interval(own) if measure == SCORE else bootstrap(own)
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
    # Sums in another order are another number, and always on the same side.
    apart = differs(own, base) and abs(difference.value) >= _SHOWN
    if perplexity:
        difference = _through(difference, math.expm1)
    better = (difference.value > 0) == MEASURES[measure]
    return Figure(
        **{
            **vars(made),
            "difference": difference.value,
            "difference_low": difference.low,
            "difference_high": difference.high,
            "verdict": ("better" if better else "worse") if apart else "",
        }
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
