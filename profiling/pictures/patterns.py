"""Pattern map: kind of each head's pattern (color) and its recall (shade)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from artifacts import Artifact, load_pair
from artifacts.errors import one_line
from artifacts.schema.patterns import RECORDS
from profiling.pictures.drawing import wrapped
from profiling.pictures.registry import Drawing, Source, picture

LEFT_ALONE = "#D9D9D9"
# Recall at which a cell is palest; below it shades no longer tell heads apart.
PALEST = 0.5
# Points of the title's type, and inches of a line of it.
_TITLE = 8
_LINE = 0.15
_SCORES = ("chosen.recall", "chosen.error", "chosen.density")


def draw_pattern_map(config: Path, stem: Path) -> list[Path]:
    """Draw an artifact's pattern map as STEM.png, STEM.svg and STEM.csv, and return the paths.

    Raises:
        HeadwiseError: the artifact cannot be read, or a file cannot be written.
    """
    artifact, arrays = load_pair(config)
    (drawing,) = patterns(Source(artifact=artifact, arrays=arrays))
    return drawing.write(stem)


@picture(of="artifact")
def patterns(source: Source) -> Iterator[Drawing]:
    """Kind of each head's pattern; the shade is its recall, where a search has measured it."""
    artifact = source.artifact
    assert artifact is not None
    shape = (artifact.model.num_layers, artifact.model.num_heads)
    scores = {
        name: source.arrays[name]
        for name in _SCORES
        if name in source.arrays and source.arrays[name].shape == shape
    }
    yield Drawing(
        name="patterns",
        figure=figure(artifact, scores.get("chosen.recall")),
        header=["layer", "head", "pattern", "kind", "recall", "error", "density"],
        rows=_rows(artifact, scores),
    )


def figure(artifact: Artifact, recall: np.ndarray | None) -> Any:
    """Draw the map as a matplotlib figure.

    Args:
        artifact: the artifact whose patterns are drawn.
        recall: (layers, heads); None draws full colors.
    """
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "headwise"
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    layers = artifact.model.num_layers
    heads = artifact.model.num_heads
    image = np.ones((heads, layers, 3))
    counts: dict[str, int] = {}
    marks: list[tuple[int, int, str]] = []
    for layer, row in enumerate(artifact.prefill.layers):
        for head in range(heads):
            if row is None:
                image[head, layer] = to_rgb(LEFT_ALONE)
                continue
            pattern = artifact.patterns[row[head]]
            counts[pattern.kind] = counts.get(pattern.kind, 0) + 1
            if pattern.lettered:
                marks.append((layer, head, pattern.letter))
            strength = 1.0
            if recall is not None:
                strength = np.clip((recall[layer, head] - PALEST) / (1 - PALEST), 0.0, 1.0)
            color = np.array(to_rgb(pattern.color))
            image[head, layer] = 1 - (0.2 + 0.8 * strength) * (1 - color)

    if recall is None:
        shades = ""
    else:
        shades = ", shade by recall"
    caption = f"{one_line(artifact.model.name)}: pattern of each head{shades}\n{_origin(artifact)}"
    # A name is no formula, and moves no cursor where the SVG is printed.
    caption = "\n".join(one_line(line).replace("$", r"\$") for line in caption.split("\n"))
    cell = min(0.32, 14 / layers)
    width = max(6.5, layers * cell + 1.2)
    lines = wrapped(caption, width - 0.2, _TITLE)
    drawn = Figure(
        figsize=(width, max(2.2, heads * cell) + 1.2 + _LINE * len(lines)),
        layout="constrained",
        dpi=150,
    )
    # Of the figure: a title of the axes would begin where a narrow map does.
    drawn.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=_TITLE)
    axes = drawn.subplots()
    axes.imshow(image, aspect="equal", interpolation="nearest", origin="lower")
    for layer, head, letter in marks:
        if image[head, layer].mean() > 0.5:
            ink = "black"
        else:
            ink = "white"
        axes.text(layer, head, letter, color=ink, fontsize=50 * cell / 2, ha="center", va="center")
    axes.set_xlabel("layer")
    axes.set_ylabel("query head")
    axes.set_xticks(range(0, layers, max(1, layers // 15)))
    axes.set_yticks(range(0, heads, max(1, heads // 12)))
    if layers * heads <= 4096:
        axes.set_xticks(np.arange(-0.5, layers), minor=True)
        axes.set_yticks(np.arange(-0.5, heads), minor=True)
        axes.grid(which="minor", color="white", linewidth=0.6)
        axes.tick_params(which="minor", length=0)
    handles = [
        Patch(color=RECORDS[kind].color, label=f"{_label(kind)} {count}")
        for kind, count in sorted(counts.items())
    ]
    if None in artifact.prefill.layers:
        handles.append(Patch(color=LEFT_ALONE, label="sliding-window layer"))
    for value in () if recall is None else (1.0, 0.75, PALEST):
        grey = 1 - 0.6 * (0.2 + 0.8 * (value - PALEST) / (1 - PALEST))
        handles.append(Patch(color=str(grey), label=f"recall {value:.2f}"))
    # The names with letters are longer: six of them are wider than a small map.
    if marks:
        columns = 5
    else:
        columns = 6
    drawn.legend(
        handles=handles,
        loc="outside lower left",
        ncols=columns,
        fontsize=7,
        frameon=False,
    )
    return drawn


def _origin(artifact: Artifact) -> str:
    """Describe the search or import of the patterns, for the caption."""
    search = artifact.search
    imported = artifact.prefill.imported
    if search is None:
        if imported:
            return f"imported from {imported.file} ({imported.format})"
        return "no pattern was searched"
    tasks = ", ".join(search.calibration.tasks)
    recall = ""
    if search.summary.recall is not None:
        recall = f", recall {search.summary.recall:.3f}"
    return (
        f"{tasks}, {search.calibration.length} tokens, {search.spending}; {search.summary.tiles}"
        f"{recall}; {search.dtype} on {search.device}, "
        f"{search.kernel_backend} kernels"
    )


def _label(kind: str) -> str:
    record = RECORDS[kind]
    if record.lettered:
        return f"{record.letter}: {kind}"
    return kind


def _rows(artifact: Artifact, scores: Mapping[str, np.ndarray]) -> Iterator[list[object]]:
    """Rows of the numbers: a line for each head, empty where nothing was measured."""
    for layer, row in enumerate(artifact.prefill.layers):
        for head, name in enumerate(row or ()):
            measures = [
                float(scores[score][layer, head]) if score in scores else "" for score in _SCORES
            ]
            yield [layer, head, name, artifact.patterns[name].kind, *measures]
