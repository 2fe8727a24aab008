"""Candidates of one head: loss and cost of each, as its search measured them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from artifacts import HeadwiseError
from artifacts.schema.patterns import RECORDS
from profiling.pictures.drawing import new_figure
from profiling.pictures.registry import Drawing, Source, picture

_LOSSES = ("objective", "change", "error")
_COSTS = ("seconds", "flops", "density")
_MEASURES = (*_LOSSES, "recall", *_COSTS)
_UNITS = {"objective": "nats/token"}


@dataclass(kw_only=True)
class Candidate:
    """A candidate of a head.

    Attributes:
        name: of the pattern, with the sizes in which heads differ.
        scores: by measure.
    """

    name: str
    scores: dict[str, float] = field(default_factory=dict)


@picture(of="artifact")
def candidates(source: Source) -> Iterator[Drawing]:
    """Loss of each candidate of `--head` by its cost; the chosen one is marked."""
    artifact = source.artifact
    assert artifact is not None and source.head is not None
    layer, head = source.head
    model = artifact.model
    if layer >= model.num_layers or head >= model.num_heads:
        raise HeadwiseError(
            f"--head must be a layer below {model.num_layers} and a head below {model.num_heads}, "
            f"such as 0.0, got {layer}.{head}"
        )
    tried = tried_by(source.arrays, layer, head)
    if not tried:
        raise HeadwiseError(
            f"the artifact has no candidates of head {layer}.{head}: headwise search measures some"
        )
    measures = [name for name in _MEASURES if all(name in each.scores for each in tried.values())]
    loss = next(name for name in _LOSSES if name in measures)
    cost = next(name for name in _COSTS if name in measures)
    selected = int(source.arrays["chosen.candidate"][layer, head])
    points = {at: (each.scores[cost], each.scores[loss]) for at, each in tried.items()}
    cheapest_first = sorted(points, key=lambda at: points[at])
    best = frontier(points)
    yield Drawing(
        name=f"candidates.{layer}.{head}",
        figure=candidates_figure(
            points,
            best,
            selected,
            names={at: each.name for at, each in tried.items()},
            title=f"layer {layer}, head {head}",
            axes=(cost, loss),
        ),
        header=["candidate", *measures, "frontier", "chosen"],
        rows=(
            [
                tried[at].name,
                *(tried[at].scores[name] for name in measures),
                at in best,
                at == selected,
            ]
            for at in cheapest_first
        ),
    )


def tried_by(arrays: Mapping[str, np.ndarray], layer: int, head: int) -> dict[int, Candidate]:
    """Return the candidates of a head by number, from arrays candidates.NUMBER.NAME.MEASURE."""
    tried: dict[int, Candidate] = {}
    for key in arrays:
        first, _, rest = key.partition(".")
        at, _, rest = rest.partition(".")
        name, _, measure = rest.rpartition(".")
        if first != "candidates" or not at.isdecimal():
            continue
        value = float(arrays[key][layer, head])
        candidate = tried.setdefault(int(at), Candidate(name=name))
        if measure not in _MEASURES:
            candidate.name += f" {measure} {value:g}"
        elif np.isfinite(value):
            candidate.scores[measure] = value
    return {at: candidate for at, candidate in tried.items() if "error" in candidate.scores}


def frontier(points: Mapping[int, tuple[float, float]]) -> list[int]:
    """Return the candidates that lose less than all that cost as little, cheapest first.

    Args:
        points: cost and loss.
    """
    best: list[int] = []
    for at in sorted(points, key=lambda at: points[at]):
        if not best or points[at][1] < points[best[-1]][1]:
            best.append(at)
    return best


def candidates_figure(
    points: Mapping[int, tuple[float, float]],
    best: Sequence[int],
    selected: int,
    *,
    names: Mapping[int, str],
    title: str,
    axes: tuple[str, str],
) -> Any:
    """Draw the loss of candidates by their cost.

    Args:
        points: cost and loss.
        best: candidates of the frontier.
        selected: the candidate in the artifact.
        names: short names of the patterns, which begin with the kind's.
        title: of the figure.
        axes: names of cost and loss.
    """
    figure = new_figure(5.5, 3.6, "frontier: no cheaper candidate has a smaller loss")
    panel = figure.subplots()
    for kind, record in RECORDS.items():
        short = record.named.partition("_{")[0]
        own = [points[at] for at in points if names[at].partition("_")[0] == short]
        if own:
            label = kind.replace("_", " ")
            panel.scatter(*zip(*own, strict=True), s=14, color=record.color, label=label)
    panel.plot(
        *zip(*(points[at] for at in best), strict=True),
        color="0.6",
        linewidth=1,
        zorder=0,
        label="frontier",
    )
    if selected in points:
        label = f"chosen: {names[selected]}"
        panel.scatter(*points[selected], s=60, color="black", marker="*", label=label, zorder=3)
    panel.set_title(title, fontsize=9, loc="left")
    panel.set_xlabel(_axis(axes[0]))
    panel.set_ylabel(f"loss: {_axis(axes[1])}")
    panel.legend(fontsize=7, frameon=False)
    return figure


def _axis(measure: str) -> str:
    """Return a measure with its unit."""
    return f"{measure}, {_UNITS[measure]}" if measure in _UNITS else measure
