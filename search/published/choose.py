"""From scores to patterns: the candidate with the smallest output error wins (MInference 1.0, Algorithm 1, line 12)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from artifacts import HeadwiseError
from kernels.patterns import Pattern, make
from search.published.score import Score
from search.published.space import Family


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What one head got."""

    candidate: int
    pattern: Pattern
    score: Score


def mean_scores(samples: Sequence[Sequence[Score]]) -> list[Score]:
    """A head's scores [sample][candidate] averaged over the prompts, [candidate]."""
    return [
        Score(
            sizes=prompts[0].sizes,
            error=fmean(s.error for s in prompts),
            recall=fmean(s.recall for s in prompts),
            density=fmean(s.density for s in prompts),
            within=all(s.within for s in prompts),
        )
        for prompts in zip(*samples, strict=True)
    ]


def choose(scores: Sequence[Score], families: Sequence[Family], *, only: str | None = None) -> Choice | None:
    """The candidate within the budget with the smallest error, of kind `only` if given; ties go to the cheaper."""
    allowed = [c for c, score in enumerate(scores) if score.within and (only is None or families[c].kind == only)]
    if not allowed:
        return None
    best = min(allowed, key=lambda c: (scores[c].error, scores[c].density, c))
    return Choice(candidate=best, pattern=make(families[best].kind, **scores[best].sizes), score=scores[best])


def choose_layer(layer: int, heads: Sequence[Sequence[Score]], families: Sequence[Family]) -> list[Choice]:
    """The choice of each head of a layer from [head][candidate] scores."""
    choices = []
    for head, scores in enumerate(heads):
        choice = choose(scores, families)
        if choice is None:
            least = min(score.density for score in scores)
            raise HeadwiseError(
                f"no candidate keeps to the budget for head {layer}.{head}: the cheapest computes {least:.3f} of dense "
                "attention; ask for a larger --budget"
            )
        choices.append(choice)
    return choices


def winners(choices: Iterable[Choice]) -> dict[str, int]:
    """How many heads each kind won, most first."""
    return dict(Counter(choice.pattern.kind for choice in choices).most_common())


def best_single_kind(heads: Sequence[Sequence[Score]], families: Sequence[Family]) -> tuple[str, float]:
    """The kind that does best when every head must take it, by mean recall, with that recall.

    A kind that some head cannot take within the budget is out; A-shape shrinks to any budget there is.
    """
    recalls = {}
    for kind in dict.fromkeys(family.kind for family in families):
        forced = [choose(scores, families, only=kind) for scores in heads]
        if all(forced):
            recalls[kind] = fmean(choice.score.recall for choice in forced if choice)
    return max(recalls.items(), key=lambda item: item[1])
