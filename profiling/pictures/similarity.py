"""Pictures of a similarity profile: layer by layer, and the quality of each layer as a filter.

Shapes: L layers, N decode steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from profiling.pictures.drawing import (
    LEFT_OUT,
    MARK,
    legend_columns,
    line_style,
    new_figure,
    shade,
    ticks,
    wrapped,
)
from profiling.pictures.registry import Drawing, Source, picture
from profiling.similarities.similarity_profile import Profile, file_name


@picture(of="profile")
def similarity(source: Source) -> Iterator[Drawing]:
    """Layer x layer similarity of each task and on average (OmniKV, Figure 8).

    The filter layers of an artifact's decode section are marked.
    """
    profile = _profile(source)
    filters: Sequence[int] = ()
    if source.artifact is not None and source.artifact.decode is not None:
        filters = source.artifact.decode.omnikv.filter_layers
    for task in [None, *(profile.tasks if len(profile.tasks) > 1 else [])]:
        mass = profile.mass(task)
        title = f"{profile.about['model']}, {task or 'mean over the tasks'}"
        yield Drawing(
            name="similarity" if task is None else f"similarity.{file_name(task)}",
            figure=similarity_figure(mass, title, _caption(source, task), filters),
            header=["layer", *(f"layer {at}" for at in range(len(mass)))],
            rows=([at, *row] for at, row in enumerate(mass.tolist())),
        )


@picture(of="profile")
def ability(source: Source) -> Iterator[Drawing]:
    """Fraction of attention that a layer's tokens keep in the layers after it (Figure 6a)."""
    profile = _profile(source)
    lines = {
        f"{task}, next {count}": profile.ability(task, count)
        for task in profile.tasks
        for count in (8, 16)
    }
    yield from _curves("ability", lines, source)


@picture(of="profile")
def hit(source: Source) -> Iterator[Drawing]:
    """Fraction of the answer's block among a layer's tokens (OmniKV, Figure 6b)."""
    profile = _profile(source)
    lines = {task: own for task in profile.tasks if (own := profile.hit(task)) is not None}
    yield from _curves("hit", lines, source)


@picture(of="profile")
def variability(source: Source) -> Iterator[Drawing]:
    """Attention missed by step when the tokens of the prompt are frozen (Figure 1c)."""
    profile = _profile(source)
    lines = {task: np.nanmean(profile.variability(task), axis=0) for task in profile.tasks}
    yield from _curves("variability", lines, source)


def _profile(source: Source) -> Profile:
    assert source.profile is not None
    return source.profile


def _curves(name: str, lines: dict[str, np.ndarray], source: Source) -> Iterator[Drawing]:
    """Yield the drawing of a picture of lines; none without lines."""
    if not lines:
        return
    values = np.stack(list(lines.values()), axis=1).tolist()
    yield Drawing(
        name=name,
        figure=curve_figure(name, lines, _profile(source), _caption(source, None)),
        header=["step" if name == "variability" else "layer", *lines],
        rows=([at, *row] for at, row in enumerate(values)),
    )


def similarity_figure(
    mass: np.ndarray, title: str, caption: str, filters: Sequence[int] = ()
) -> Any:
    """Layer x layer similarity (OmniKV, Figure 8): row i chooses, column j attends.

    Args:
        mass: (L, L), NaN for layers left out.
        title: printed above the figure.
        caption: printed below the figure.
        filters: rows to mark.
    """
    from matplotlib.patches import Patch

    n = len(mass)
    later = np.triu(np.ones((n, n), dtype=bool))
    seen = mass[later & np.isfinite(mass)]
    if len(seen):
        low = np.floor(10 * np.quantile(seen, 0.02)) / 10
    else:
        low = 0.0
    image, scale = shade(mass, min(low, 0.9), 1.0)
    image[~later] = 1.0
    side = float(np.clip(0.16 * n, 3.2, 9.0))
    figure = new_figure(side + 1.8, side + 1.2, caption)
    axes = figure.subplots()
    axes.imshow(image, interpolation="nearest")
    axes.set_title("\n".join(wrapped(title, side, 9)), fontsize=9, loc="left")
    axes.set_xlabel("layer that attends")
    axes.set_ylabel("layer that chooses")
    axes.set_xticks(ticks(n))
    axes.set_yticks(ticks(n))
    axes.spines[:].set_visible(False)
    figure.colorbar(
        scale, ax=axes, shrink=0.8, label="fraction of attention on the chosen tokens", extend="min"
    )
    marks = []
    if np.isnan(mass[later]).any():
        marks.append(Patch(color=LEFT_OUT, label="left out: sliding window, or no attention"))
    for layer in filters:
        box = (layer - 0.5, layer - 0.5), n - layer, 1
        axes.add_patch(_outline(*box))
    if filters:
        shown = ", ".join(map(str, filters))
        label = "\n".join(wrapped(f"filter layers {shown}", side - 1.2, 7))
        marks.append(Patch(facecolor="none", edgecolor=MARK, label=label))
    if marks:
        axes.legend(handles=marks, loc="lower left", fontsize=7, frameon=False)
    return figure


def curve_figure(name: str, lines: Mapping[str, np.ndarray], profile: Profile, caption: str) -> Any:
    """Draw `ability`, `hit` (OmniKV, Figures 6a, 6b) or `variability` (Figure 1c)."""
    labels = {
        "ability": "fraction of attention kept, mean",
        "hit": "fraction of the answer's block chosen",
        "variability": "attention missed, mean over layers",
    }
    width = 7.2
    figure = new_figure(width, 3.4, caption)
    axes = figure.subplots()
    for at, (label, values) in enumerate(lines.items()):
        style = line_style(at)
        if name == "ability":
            style = line_style(at // 2) | {"linestyle": ("-", "--")[at % 2]}
        if len(values) <= 48:
            dots = {"marker": "o", "markersize": 3}
        else:
            dots = {}
        seen = np.flatnonzero(np.isfinite(values))
        axes.plot(seen, values[seen], label=label, linewidth=1.3, **dots, **style)
        if name == "variability":
            spread = np.nanquantile(profile.variability(label), [0.1, 0.9], axis=0)
            axes.fill_between(seen, *spread, color=style["color"], alpha=0.12, linewidth=0)
    if name == "hit":
        chance = profile.about["top_k"] / profile.about["length"]
        axes.axhline(
            chance, color="#404040", linewidth=0.8, linestyle=":", label="chosen at random"
        )
    if name == "variability":
        x_label = "decode step"
    else:
        x_label = "layer that chooses"
    axes.set_xlabel(x_label)
    axes.set_ylabel(labels[name])
    if name == "variability":
        top = None
    else:
        top = 1.02
    axes.set_ylim(bottom=0, top=top)
    axes.set_xticks(ticks(max(map(len, lines.values()))))
    axes.grid(color="#E0E0E0", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    columns = min(3, legend_columns(lines, width, 7))
    figure.legend(loc="outside upper left", ncols=columns, fontsize=7, frameon=False)
    return figure


def _outline(corner: tuple[float, float], width: float, height: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(
        corner, width, height, fill=False, edgecolor=MARK, linewidth=1.2, clip_on=False
    )


def _caption(source: Source, task: str | None) -> str:
    about = _profile(source).about
    texts = {
        entry["name"]: entry["sha256"][:8]
        for entry in about["tasks"]
        if task in (None, entry["name"])
    }
    return "\n".join(
        [
            f"{about['model']}: {about['length']} tokens, the top {about['top_k']} of each layer, "
            f"{about['steps']} "
            f"decode steps of {about['samples']} prompts a task; {about['dtype']} on "
            f"{about['device']}",
            "prompts: " + ", ".join(f"{name} ({digest})" for name, digest in texts.items()),
            f"measured: {about['command']}",
            f"drawn: {source.command}",
        ]
    )
