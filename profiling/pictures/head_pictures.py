"""Pictures of single heads: attention maps with the pattern that serves them, and sparsity.

Shapes: L layers, H query heads, S prompt length, P pooled cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from profiling.pictures.drawing import LEFT_OUT, LINES, MAP, MARK, new_figure, shade, ticks
from profiling.pictures.head_survey import HeadMap

# Shares of a query's attention below this are drawn like it.
_FAINTEST = 1e-4
# How far what is not computed is washed out.
_WASH = 0.85


def maps_figure(maps: Sequence[HeadMap], caption: str) -> Any:
    """Draw each head's attention, and next to it the part that its pattern computes."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    scale = ScalarMappable(LogNorm(_FAINTEST, 1.0), colormaps[MAP])
    panels = [
        (head_map, over)
        for head_map in maps
        for over in ((False, True) if head_map.computed is not None else (False,))
    ]
    columns = min(len(panels), 4)
    rows = -(-len(panels) // columns)
    figure = new_figure(2.9 * columns + 0.9, 3.1 * rows + 0.2, caption, layout="compressed")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (head_map, over) in zip(grid.flat, panels, strict=False):
        _map_panel(axes, head_map, over, scale)
    figure.colorbar(
        scale, ax=grid, shrink=0.7, label="fraction of a query's attention", extend="min"
    )
    return figure


def _map_panel(axes: Any, head_map: HeadMap, over: bool, scale: Any) -> None:
    n = len(head_map.attention)
    image = scale.to_rgba(np.maximum(head_map.attention, _FAINTEST))[..., :3]
    title = f"layer {head_map.layer}, head {head_map.head}"
    if over and head_map.computed is not None:
        image += (1 - np.minimum(head_map.computed, 1.0))[..., None] * _WASH * (1 - image)
        title = f"{head_map.pattern}\nkeeps {head_map.recall:.3f}, computes {head_map.density:.3f}"
    image[np.triu_indices(n, 1)] = 1.0
    edge = n * head_map.cell
    axes.imshow(image, interpolation="nearest", extent=(0, edge, edge, 0))
    if over and head_map.computed is not None:
        _outline(axes, head_map.computed, head_map.cell)
    axes.set_title(title, fontsize=7, loc="left")
    axes.set_xticks([0, edge // 2, edge])
    axes.set_yticks([0, edge // 2, edge])
    axes.tick_params(labelsize=6)
    axes.set_xlabel("key", fontsize=7)
    axes.set_ylabel("query", fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _outline(axes: Any, computed: np.ndarray, cell: int) -> None:
    """A line around the cells of which more than half is computed."""
    inside = np.pad(computed > 0.5, 1)
    lines = []
    for y, x in np.argwhere(inside[1:, 1:-1] != inside[:-1, 1:-1]):
        lines.append([(x * cell, y * cell), ((x + 1) * cell, y * cell)])
    for y, x in np.argwhere(inside[1:-1, 1:] != inside[1:-1, :-1]):
        lines.append([(x * cell, y * cell), (x * cell, (y + 1) * cell)])
    from matplotlib.collections import LineCollection

    axes.add_collection(LineCollection(lines, colors=MARK, linewidths=0.6))


def grid_figure(values: np.ndarray, label: str, caption: str) -> Any:
    """Draw a fraction of each head, (L, H), and layer means (MInference, Fig. 12; H2O, 2a)."""
    from matplotlib.patches import Patch

    layers, heads = values.shape
    cell = min(0.3, 13 / layers)
    figure = new_figure(
        max(6.0, layers * cell + 1.6), max(1.6, min(heads * cell, 8.0)) + 2.4, caption
    )
    upper, lower = figure.subplots(
        2, 1, sharex=True, height_ratios=[max(1.6, min(heads * cell, 8.0)), 1.2]
    )
    # A few heads far below the others are not to take the colours of all.
    low = min(0.9, float(np.floor(10 * np.nanquantile(values, 0.02)) / 10))
    high = min(1.0, float(np.ceil(10 * np.nanmax(values)) / 10))
    image, scale = shade(values.T, low, high)
    upper.imshow(image, interpolation="nearest", origin="lower", aspect="auto")
    upper.set_ylabel("query head")
    upper.set_yticks(ticks(heads, 12))
    figure.colorbar(scale, ax=upper, label=label, extend="min", aspect=12)
    if np.isnan(values).any():
        upper.legend(
            handles=[Patch(color=LEFT_OUT, label="left out: sliding window, or no attention")],
            loc="lower right",
            bbox_to_anchor=(1, 1),
            fontsize=7,
            frameon=False,
        )
    measured = np.flatnonzero(np.isfinite(values).any(1))
    kept = values[measured]
    lower.fill_between(
        measured,
        kept.min(1),
        kept.max(1),
        color=LINES[0],
        alpha=0.2,
        linewidth=0,
        label="least to most",
    )
    lower.plot(measured, kept.mean(1), color=LINES[0], linewidth=1.3, label="mean of the heads")
    lower.set_ylim(top=high + 0.005)
    lower.set_ylabel("of a layer")
    lower.set_xlabel("layer")
    lower.set_xticks(ticks(layers))
    lower.grid(color="#E0E0E0", linewidth=0.6)
    lower.spines[["top", "right"]].set_visible(False)
    lower.legend(fontsize=7, frameon=False, loc="best")
    return figure
