"""The frontier: budgets with the time to the first token and the loss, predicted or measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

import numpy as np

from artifacts.page.layout import aligned
from artifacts.schema.evidence import percent
from artifacts.schema.search import FrontierPoint
from profiling.speed.baselines import HEADWISE
from search.model.proof import KINDS, Kind
from search.model.run import Round, SearchRun
from search.model.speed import clock_drift

# Predicted budgets: how many, and from which to which multiple of the accepted one.
_COUNT = 6
_LOWEST = 0.5
_HIGHEST = 2.5
# A predicted budget this near to a measured one is left out.
_NEAR = 0.05
# A measured loss of nothing says little of cheaper budgets: at least this part of its bound is
# scaled.
_PART_OF_BOUND = 0.1


def frontier(run: SearchRun) -> tuple[FrontierPoint, ...]:
    """The tested budgets, and predicted ones around the accepted one, the cheapest first."""
    measured = [_measured(run, each) for each in run.rounds]
    predicted = [_predicted(run, share) for share in _shares(run)]
    points = {
        point.spent: point
        for point in predicted
        if all(abs(point.spent / each.spent - 1) > _NEAR for each in measured)
    }
    points |= {point.spent: point for point in measured}
    return tuple(points[spent] for spent in sorted(points))


def _shares(run: SearchRun) -> Iterator[float]:
    """Budgets around the accepted one, in geometric steps."""
    heads = run.heads
    low = max(run.spent * _LOWEST, heads.share(heads.least(run.allocation.tail)) * 1.02)
    high = min(run.spent * _HIGHEST, 1.0)
    if low < high:
        yield from np.geomspace(low, high, _COUNT).tolist()


def _measured(run: SearchRun, tested: Round) -> FrontierPoint:
    verdict = tested.proof.verdict
    return FrontierPoint(
        spent=round(run.heads.share(tested.allocation.cost), 4),
        seconds=_seconds(run, tested.allocation.cost),
        lost=_rounded(verdict.lost),
        lost_high=_rounded(verdict.lost_high),
        perplexity=_rounded(verdict.perplexity),
        measured=True,
    )


def _predicted(run: SearchRun, share: float) -> FrontierPoint:
    """Losses are taken to be proportional to those that the curves predict."""
    allocation = run.heads.reallocate(run.allocation, run.heads.total(share))
    verdict = run.accepted.proof.verdict
    ratios = loss_ratios(run, allocation.candidates)
    is_cheaper = allocation.cost < run.allocation.cost

    def scaled(value: float | None, high: float | None, ratio: float) -> float | None:
        if value is None:
            return None
        base = max(value, _PART_OF_BOUND * (high or 0.0))
        return scaled_loss(base, ratio, least=value if is_cheaper else None)

    lost = scaled(verdict.lost, verdict.lost_high, ratios["answer"])
    perplexity = scaled(verdict.perplexity, verdict.perplexity_high, ratios["text"])
    return FrontierPoint(
        spent=round(run.heads.share(allocation.cost), 4),
        seconds=_seconds(run, allocation.cost),
        lost=None if lost is None else _rounded(min(lost, 1.0)),
        perplexity=_rounded(perplexity),
        measured=False,
    )


def loss_ratios(run: SearchRun, candidates: np.ndarray) -> dict[Kind, float]:
    """Predicted losses of an allocation over those of the accepted one, by kind.

    Args:
        run: the search.
        candidates: (L, H) of the allocation, with the accepted dense tail.
    """
    heads = run.heads
    other = heads.losses_of(candidates, run.allocation.tail)
    accepted = heads.losses_of(run.allocation.candidates, run.allocation.tail)
    ratios = {kind: other[kind] / max(loss, 1e-12) for kind, loss in accepted.items()}
    # Curves without gradients are of one kind.
    return {kind: ratios.get(kind, max(ratios.values())) for kind in KINDS}


def scaled_loss(loss: float, ratio: float, *, least: float | None) -> float:
    """The loss that is predicted of an allocation from that of the accepted one.

    Args:
        loss: of the accepted allocation. A gain says nothing of others: it counts as no loss.
        ratio: of the losses that the curves predict.
        least: the accepted allocation's, of a cheaper one; None where it may be less.
    """
    scaled = max(loss, 0.0) * ratio
    if least is None:
        return scaled
    return max(scaled, least)


def _seconds(run: SearchRun, cost: float) -> float | None:
    """Seconds to the first token: those of the accepted allocation and the difference in cost."""
    if not run.prefills:
        return None
    seconds = median(run.prefills[HEADWISE])
    return round(seconds + (cost - run.allocation.cost) * clock_drift(run), 3)


def _rounded(loss: float | None) -> float | None:
    """A loss as the artifact has it, which people read."""
    if loss is None:
        return None
    return round(loss, 5)


def table(points: Sequence[FrontierPoint], spent: float) -> list[str]:
    """The frontier as lines of text.

    Args:
        points: of the frontier.
        spent: the budget in the artifact, which is marked.
    """
    rows = [["budget", "first token", "fewer correct answers", "perplexity", ""]]
    for point in points:
        seconds = "-"
        if point.seconds is not None:
            seconds = f"{point.seconds:.3g} s"
        lost = "-"
        if point.lost is not None:
            lost = percent(point.lost)
        if point.lost_high is not None:
            lost += f", at most {percent(point.lost_high)}"
        perplexity = "-"
        if point.perplexity is not None:
            perplexity = f"{point.perplexity:+.1%}"
        state = "measured" if point.measured else "predicted"
        if point.measured and abs(point.spent - spent) < 1e-4:
            state += ", in the artifact"
        rows.append([f"{point.spent:.3f}", seconds, lost, perplexity, state])
    return aligned(rows, left=(4,), indent=2)
