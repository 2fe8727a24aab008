"""What was chosen for decode, on the prompts that chose and on held-out ones, and what is said of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from artifacts.errors import plural
from profiling.similarities.budget_meter import Point
from profiling.similarities.similarity_profile import Profile
from search.decode.coverage import lines_of
from search.decode.filter_layers import Choice, served
from search.decode.head_map import KINDS


@dataclass(frozen=True, kw_only=True)
class Score:
    """A choice on some prompts: mean attention mass kept, summed errors, and these task by task."""

    choice: Choice
    kept: float
    error: float
    by_task: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Found:
    """The choice on the prompts it was made by, and it and others like it on held-out ones.

    pooled: the best choice for all heads together. tried: kinds of maps on prompts of their own, by which the choice's
    was taken. points: what the coverage and fixed budgets beside it come to.
    """

    made_by: Score
    held_out: Score
    even: Score
    random: tuple[Score, ...]
    profile: Profile
    pooled: Score
    tried: tuple[Score, ...] = ()
    coverage: float | None = None
    points: tuple[Point, ...] = ()

    @property
    def choice(self) -> Choice:
        return self.made_by.choice

    @property
    def random_kept(self) -> float:
        return float(np.mean([score.kept for score in self.random]))

    @property
    def random_error(self) -> float:
        return float(np.mean([score.error for score in self.random]))


def _scores(found: Found) -> dict[str, Score]:
    """By the names of the report."""
    return {
        "chosen on": found.made_by,
        "held-out prompts": found.held_out,
        "one choice for all": found.pooled,
        "evenly spaced": found.even,
    }


def record(found: Found) -> dict[str, Any]:
    """The figures of the report as plain data, with what they were measured on."""
    names = ("chosen_on", "held_out", "one_for_all", "evenly_spaced")
    scores = dict(zip(names, _scores(found).values(), strict=True))
    scores |= {f"tried {kind}": score for kind, score in zip(KINDS, found.tried, strict=False)}
    about = found.profile.about
    return {
        "scores": {
            name: {
                "kept": score.kept,
                "error": score.error,
                "mapped": score.choice.takes is not None,
                "filter_layers": score.choice.filter_layers,
                "dense_layers": score.choice.dense_layers,
            }
            for name, score in scores.items()
        },
        "random": {"choices": len(found.random), "kept": found.random_kept, "error": found.random_error},
        "coverage": found.coverage,
        "points": [asdict(point) for point in found.points],
        "settings": {name: about[name] for name in ("model", "length", "steps", "samples", "top_k", "sets", "dtype")},
        "tasks": about["tasks"],
        "versions": about["versions"],
    }


def _whose(found: Found) -> str:
    """Whose tokens a KV head takes."""
    if found.choice.takes is None:
        return "all heads together"
    rows = [found.choice.takes[layer] for layer in served(found.profile.layers, found.choice)]
    sizes = Counter(len(found.profile.choosers[at]) for row in rows for at in row)
    of = "; ".join(f"{plural(size, 'KV head')} for {count}" for size, count in sorted(sizes.items()))
    return f"the best-fitting KV heads of the filter layer: {of}"


def report(found: Found) -> str:
    """What was chosen, what it keeps of attention and changes, beside what it is compared with."""
    choice, n = found.choice, len(found.profile.layers)
    rows: list[tuple[str, float, float, str]] = []
    for what, score in _scores(found).items():
        if score is not found.pooled or choice.takes is not None:
            other = score is found.pooled or score is found.even
            rows.append((what, score.kept, score.error, f"({named(score.choice.filter_layers)})" * other))
    kept, errors = [score.kept for score in found.random], [score.error for score in found.random]
    rows += [(f"{len(kept)} random, mean", found.random_kept, found.random_error, "")]
    rows += [("best of these", max(kept), min(errors), "")]
    lines = [
        f"filter layers {named(choice.filter_layers)}; dense {named(choice.dense_layers)}; "
        f"{n - choice.full} of {n} full-attention layers are sparse",
        f"with the top {found.profile.about['top_k']} tokens of {_whose(found)}",
        f"{'':<27}kept       error",
        *(f"  {what:<21}{mass:8.4f}{error:12.5f}  {note}".rstrip() for what, mass, error, note in rows),
    ]
    if found.tried:
        tried = (f"--heads {kind} {score.error:.5f}" for kind, score in zip(KINDS, found.tried, strict=False))
        lines.append(
            f"error on other prompts again: {', '.join(tried)}; a head map is taken where it has less beyond chance"
        )
    lines.append(
        "kept: attention mass, mean over the layers; error: squared change of the sparse layers' outputs relative to "
        "the residual stream, summed"
    )
    return "\n".join([*lines, *lines_of(found.points)])


def named(layers: Sequence[int]) -> str:
    """Layers with commas between."""
    return ", ".join(map(str, layers)) or "none"
