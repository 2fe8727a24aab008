"""Proof of a loss: its upper confidence bound is below the limit, by as few contexts as it takes.

A group-sequential test of non-inferiority. The same bound is computed at each look, an interim
analysis of 4, 8 and 16 contexts, and the confidence that one test may spend is divided over its
looks (Bonferroni), so that all of them together err as rarely as one. Each kind of loss has looks
of its own: an allocation is proven where both kinds are, so their errors do not add up.

docs/internals.md has the error of the whole in simulated searches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import NormalDist
from typing import Literal

from artifacts import Verdict
from artifacts.errors import plural
from profiling.evaluation.intervals import Interval
from search.model.limits import Limits
from search.model.losses import (
    ContextLoss,
    lost_fraction,
    perplexity_rise,
    pooled,
    task_figures,
)

Kind = Literal["text", "answer"]
# The cheaper kind first: a text whose loss is too large ends a look.
KINDS: tuple[Kind, ...] = ("text", "answer")
_NAMES: dict[Kind, str] = {"text": "window of text", "answer": "context with answers"}
# Contexts of each task with answers, and windows of each text, at each look.
LOOKS = (4, 8, 16)
# Fractions of a test's error that its looks may spend.
_SPENDING = (0.1, 0.3, 0.6)
# Probability that a whole search accepts a loss beyond a limit, at most, and the fractions of it
# that the first budget and those after a raise may spend. A cheaper budget that is tried after the
# first was proven may spend all: if the first was proven rightly, it is the only one that can err.
ERROR = 0.05
ROUNDS = (0.8, 0.1, 0.05, 0.05)
# Correlation of the answers of one context that is assumed at least. Measured: 0.001 to 0.014.
_CORRELATION = 0.03
# The most contexts that advice names.
_MOST = 512

Measure = Callable[[Kind, int], Sequence[ContextLoss]]
"""Measures this many further contexts of each task of a kind; fewer where a text ends.

A kind whose first look measures none proves nothing.
"""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Result of a test.

    Attributes:
        losses: of all contexts that were measured.
        verdict: bounds and limits.
        fault: the first loss that exceeds a limit; None where none does.
        ratios: by kind, the measured loss in multiples of its limit.
        unjudged: True if dense attention answers nothing correctly, so that there is nothing to
            lose, and all other losses are proven.
    """

    losses: tuple[ContextLoss, ...]
    verdict: Verdict
    fault: str | None
    ratios: dict[Kind, float]
    unjudged: bool = False


def prove(measure: Measure, limits: Limits, *, kinds: Collection[Kind], error: float) -> Proof:
    """Measure losses until they are proven to be within the limits, exceed them, or contexts end.

    Args:
        measure: measures further contexts.
        limits: of the losses.
        kinds: that the tasks have. Nothing is proven where one of them has no contexts.
        error: probability of proving a loss that is beyond its limit, at most.
    """
    losses: dict[Kind, list[ContextLoss]] = {kind: [] for kind in KINDS}
    bounds: dict[Kind, Interval] = {}
    proven: set[Kind] = set()
    unjudged: str | None = None
    unmeasured: str | None = None
    if not kinds:
        unmeasured = "nothing was measured"
    fault = None
    measured = 0
    for look, contexts in enumerate(LOOKS):
        for kind in KINDS:
            if kind not in kinds or kind in proven or fault is not None:
                continue
            losses[kind] += measure(kind, contexts - measured)
            if not losses[kind]:
                unmeasured = f"no {_NAMES[kind]} was measured: take a longer text"
                break
            level = error * _SPENDING[look]
            bounds[kind] = bound(kind, losses[kind], limits, level)
            is_within = bounds[kind].high <= limit_of(kind, limits)
            # No bound of answers that dense attention gets wrong proves anything.
            if kind == "answer" and not any(each.dense_right for each in losses[kind]):
                questions = sum(each.answers for each in losses[kind])
                unjudged = (
                    f"dense attention answers none of {questions:,} questions correctly, so "
                    "nothing shows what is lost: take a --task that it can answer, or a shorter "
                    "--length"
                )
                proven.add(kind)
            elif is_within and counted(losses[kind]) <= limits.max_lost:
                proven.add(kind)
            fault = limits.exceeded(task_figures(list(chain.from_iterable(losses.values()))))
            # One look of few contexts says little of a loss near the limit; two say enough.
            if fault is None and look and kind not in proven:
                fault = _hopeless(kind, bounds[kind], limits)
        measured = contexts
        if fault is not None or unmeasured is not None or proven == set(kinds):
            break
    why = fault or unmeasured
    if why is None and proven != set(kinds):
        open_kinds = [kind for kind in KINDS if kind in kinds and kind not in proven]
        why = _open(bounds, losses, limits, error, open_kinds)
    why = why or unjudged
    ratios = {kind: each.value / limit_of(kind, limits) for kind, each in bounds.items()}
    return Proof(
        losses=tuple(chain.from_iterable(losses.values())),
        verdict=_verdict(bounds, limits, why),
        fault=fault,
        ratios=ratios,
        unjudged=unjudged is not None and fault is None and proven == set(kinds),
    )


def limit_of(kind: Kind, limits: Limits) -> float:
    """The limit of a kind of loss."""
    if kind == "text":
        return limits.max_perplexity
    return limits.max_lost


def bound(kind: Kind, losses: Sequence[ContextLoss], limits: Limits, level: float) -> Interval:
    """The measured loss of a kind, and its one-sided upper bound as the upper end.

    Student's bound over contexts. Of answers it is at least the bound of answers that are right or
    wrong at a rate of the limit, correlated within a context: a few contexts that happen to be
    alike have too small a spread.

    Args:
        kind: of the losses.
        losses: of contexts.
        limits: of the losses.
        level: probability that the loss is above its bound.

    Returns:
        The interval, with infinite ends where there is one context.
    """
    if kind == "text":
        interval = perplexity_rise(losses, 1 - 2 * level)
    else:
        losses = pooled(losses)
        interval = lost_fraction(losses, 1 - 2 * level)
    if interval.count == 1:
        return Interval(interval.value, -math.inf, math.inf, 1)
    if kind == "text":
        return interval
    correct = sum(context.clear for context in losses)
    spread = _spread(limits.max_lost, correct, interval.count)
    least = interval.value + NormalDist().inv_cdf(1 - level) * spread
    return Interval(interval.value, interval.low, max(interval.high, least), interval.count)


def _spread(limit: float, correct: float, contexts: int) -> float:
    """Standard error of the fraction lost where it is the limit and answers are right or wrong.

    Beyond a half, where it would fall again, it is that of a half.
    """
    rate = min(limit, 0.5)
    return math.sqrt(rate * (1 - rate) * (1 / max(1.0, correct) + _CORRELATION / contexts))


def counted(losses: Sequence[ContextLoss]) -> float:
    """The fraction of correct answers that is lost by counting them, less those won; 0 of text.

    No bound of the smoothed loss proves what the counts deny.
    """
    right = sum(context.dense_right for context in losses)
    return sum(context.lost - context.won for context in losses) / max(1, right)


def _hopeless(kind: Kind, interval: Interval, limits: Limits) -> str | None:
    """Describe a measured loss above its limit; None where more contexts may prove it."""
    if interval.value <= limit_of(kind, limits):
        return None
    if kind == "text":
        return (
            f"perplexity rises by {interval.value:.2%}, the limit is "
            f"{limits.max_perplexity:.2%} (--max-perplexity)"
        )
    return (
        f"{interval.value:.1%} fewer correct answers, the limit is {limits.max_lost:.1%} "
        "(--max-lost)"
    )


def _open(
    bounds: dict[Kind, Interval],
    losses: dict[Kind, list[ContextLoss]],
    limits: Limits,
    error: float,
    kinds: Sequence[Kind],
) -> str:
    """Describe the bound that the last look leaves open, and the contexts that would prove it."""
    kind = kinds[0]
    interval = bounds[kind]
    limit = limit_of(kind, limits)
    if kind == "text":
        units = plural(interval.count, "window")
        what = f"up to {interval.high:.2%} more perplexity"
        option = "--max-perplexity"
    else:
        units = plural(interval.count, "context")
        what = f"up to {interval.high:.1%} fewer correct answers"
        option = "--max-lost"
    if interval.high <= limit:
        fewer = counted(losses["answer"])
        return (
            f"{fewer:.1%} fewer correct answers by counting them after {units}, the limit "
            f"is {limit:.1%} ({option})"
        )
    if interval.count == 1:
        return f"one {units.partition(' ')[2]} has no confidence interval, take a longer text"
    if not interval.is_known:
        return f"{units} have no confidence interval: one has all answers that dense attention gets"
    line = f"{what} after {units}, the limit is {limit:.1%} ({option})"
    correct = sum(context.clear for context in losses["answer"])
    needed = contexts_needed(kind, interval, limit, correct, error * _SPENDING[-1])
    if needed is None:
        return line
    return f"{line}; about {needed} would prove it if the loss is as measured"


def contexts_needed(
    kind: Kind, interval: Interval, limit: float, correct: float, level: float
) -> int | None:
    """Contexts whose bound would be within the limit if the loss is as measured.

    Args:
        kind: of the loss.
        interval: the measured loss with its bound.
        limit: of the loss.
        correct: answers that dense attention gets right in these contexts.
        level: error of the last look.

    Returns:
        Their number; None where the loss is too near its limit, or beyond.
    """
    half = (interval.high - interval.value) * math.sqrt(interval.count)
    quantile = NormalDist().inv_cdf(1 - level)
    for contexts in range(interval.count + 1, _MOST + 1):
        least = 0.0
        if kind == "answer":
            more = correct * contexts / interval.count
            least = quantile * _spread(limit, more, contexts)
        if interval.value + max(half / math.sqrt(contexts), least) <= limit:
            return contexts
    return None


def _verdict(bounds: dict[Kind, Interval], limits: Limits, why: str | None) -> Verdict:
    text = bounds.get("text")
    answer = bounds.get("answer")
    return Verdict(
        proven=why is None,
        why=why,
        contexts=answer.count if answer else 0,
        lost=answer.value if answer else None,
        lost_high=_finite(answer),
        max_lost=limits.max_lost if answer else None,
        windows=text.count if text else 0,
        perplexity=text.value if text else None,
        perplexity_high=_finite(text),
        max_perplexity=limits.max_perplexity if text else None,
    )


def _finite(interval: Interval | None) -> float | None:
    if interval is None or not math.isfinite(interval.high):
        return None
    return interval.high
