"""Page of one head: the candidates that were tried, the choice, and a picture of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from artifacts.errors import ArtifactError, number
from artifacts.page.layout import aligned
from artifacts.schema.artifact import Artifact
from artifacts.schema.patterns import TILE, AnyPattern, Layout, grown

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

_MEASURES = ("error", "recall", "density", "objective", "change", "seconds", "flops")
_CELLS = 24
_SAMPLES = 4
_MARKS = "·░▒▓█"


@dataclass(kw_only=True)
class _Tried:
    """One candidate: its name, with sizes where heads differ, and its scores for the head."""

    label: str
    scores: dict[str, float] = field(default_factory=dict)

    def first(self, *names: str) -> float:
        """The first score of these that the search has."""
        return next(self.scores[name] for name in names if name in self.scores)


def render_head(artifact: Artifact, arrays: Mapping[str, Array], layer: int, head: int) -> str:
    """The curve of a head (candidate, loss, cost), its neighbours on it, and a picture.

    Raises:
        ArtifactError: there is no such head, or the layer is left alone.
    """
    model = artifact.model
    if layer >= model.num_layers or head >= model.num_heads:
        raise ArtifactError(
            f"no head {layer}.{head}: {model.num_layers} layers have {model.num_heads} heads each"
        )
    row = artifact.prefill.layers[layer]
    if row is None:
        raise ArtifactError(f"layer {layer} is left as it is: no head of it has a pattern")
    if artifact.search:
        length = artifact.search.calibration.length
    else:
        length = model.max_positions
    pattern = grown(artifact.patterns[row[head]], artifact.prefill.length, length)
    return "\n".join(
        [
            f"layer {layer}, head {head}: {row[head]}",
            *_curve(arrays, layer, head),
            f"computed of {length:,} tokens, queries downwards (chosen columns and blocks drawn as "
            f"the nearest):",
            *picture(pattern, length),
        ]
    )


def _curve(arrays: Mapping[str, Array], layer: int, head: int) -> Iterator[str]:
    tried = {at: each for at, each in _tried(arrays, layer, head).items() if "error" in each.scores}
    if not tried:
        yield "no candidates were tried for it: headwise search tries some"
        return
    if "chosen.candidate" in arrays:
        chosen = int(arrays["chosen.candidate"][layer, head])
    else:
        chosen = -1
    unit = next(
        name
        for name in ("seconds", "flops", "density")
        if any(name in each.scores for each in tried.values())
    )
    cost = {}
    loss = {}
    for at, each in tried.items():
        cost[at] = each.scores[unit]
        loss[at] = each.first("objective", "change", "error")
    ordered = sorted(tried, key=lambda at: (cost[at], loss[at]))
    frontier: list[int] = []
    for at in ordered:
        if not frontier or loss[at] < loss[frontier[-1]]:
            frontier.append(at)
    rows = [["", "candidate", "loss", unit, "error", "recall", ""]]
    for at in ordered:
        scores = tried[at].scores
        figures = [
            f"{loss[at]:.3g}",
            number(cost[at]),
            f"{scores['error']:.4f}",
            f"{scores['recall']:.4f}",
        ]
        if at in frontier:
            on_it = "frontier"
        else:
            on_it = ""
        if at == chosen:
            mark = "*"
        else:
            mark = ""
        rows.append([mark, tried[at].label, *figures, on_it])
    yield from aligned(rows, left=(0, 1, 6))
    yield "*: chosen; frontier: nothing that costs as little loses less"
    if chosen not in tried:
        return
    cheaper = [at for at in frontier if cost[at] < cost[chosen]]
    dearer = [at for at in frontier if cost[at] > cost[chosen]]
    for name, near in (("cheaper", cheaper[-1:]), ("dearer", dearer[:1])):
        for at in near:
            spent = cost[at] - cost[chosen]
            lost = loss[at] - loss[chosen]
            yield (
                f"next {name}: {tried[at].label}, {unit} {spent:+.3g}, loss "
                f"{lost:+.3g} ({-lost / spent:.3g} a unit)"
            )
    if "allocation.price" in arrays:
        price = arrays["allocation.price"].reshape(-1)
        yield (
            f"the price of the model's budget: {float(price[layer % len(price)]):.3g} of weighted "
            "loss a unit"
        )


def _tried(arrays: Mapping[str, Array], layer: int, head: int) -> dict[int, _Tried]:
    """Candidates of a head, from arrays candidates.NUMBER.NAME.MEASURE of (layers, heads)."""
    tried: dict[int, _Tried] = {}
    for key in arrays:
        first, _, rest = key.partition(".")
        at, _, rest = rest.partition(".")
        name, _, measure = rest.rpartition(".")
        if first != "candidates" or not at.isdecimal():
            continue
        value = float(arrays[key][layer, head])
        each = tried.setdefault(int(at), _Tried(label=name))
        if measure not in _MEASURES:
            each.label += f" {measure} {value:g}"
        elif value == value:
            each.scores[measure] = value
    return tried


def picture(pattern: AnyPattern, length: int) -> list[str]:
    """Draw queries by keys as lines; a cell goes from · (nothing computed) to █ (all)."""
    layout = pattern.layout(length)
    step = length / _CELLS / _SAMPLES
    lines = []
    for row in range(_CELLS):
        marks = ""
        for column in range(row + 1):
            pairs = [
                (int((row * _SAMPLES + i + 0.5) * step), int((column * _SAMPLES + j + 0.5) * step))
                for i in range(_SAMPLES)
                for j in range(_SAMPLES)
            ]
            seen = [_computes(layout, query, key) for query, key in pairs if key <= query]
            marks += _MARKS[-(-sum(seen) * (len(_MARKS) - 1) // len(seen))]
        lines.append(f"  {marks}")
    return lines


def _computes(layout: Layout | None, query: int, key: int) -> bool:
    """True where a pattern computes a pair; choices are taken as first columns or nearest."""
    if layout is None:
        return True
    return key < max(layout.columns, TILE) or query // TILE - key // TILE < layout.near
