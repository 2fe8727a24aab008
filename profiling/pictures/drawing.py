"""Shared by pictures: colors for any color vision, captions, reproducible files, CSV.

Each picture is a matplotlib Figure without pyplot: no window system, no state.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from artifacts.files import atomic_write
from profiling.values import csv_text

# Okabe and Ito's palette, without its yellow, which is lost on white.
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")
MAP = "viridis"
LEFT_OUT = "#D9D9D9"
MARK = LINES[1]
# Characters in 6 points for each inch of a line.
_CHARACTERS = 17

Layout = Literal["constrained", "compressed"]


def new_figure(width: float, height: float, caption: str, *, layout: Layout = "constrained") -> Any:
    """An empty figure of that many inches, with a caption in small print below.

    Args:
        width: in inches.
        height: in inches.
        caption: printed below the figure.
        layout: matplotlib's; "compressed" for a grid of square panels.
    """
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "headwise"
    from matplotlib.figure import Figure

    lines = wrapped(caption, width, 6)
    figure = Figure(figsize=(width, height + 0.14 * len(lines)), layout=layout, dpi=150)
    figure.supxlabel(
        "\n".join(lines), x=0.01, ha="left", fontsize=6, color="#404040", linespacing=1.3
    )
    return figure


def wrapped(text: str, width: float, size: float) -> list[str]:
    """Break a text into lines that fit a width in inches, at a font size in points."""
    limit = int(width * _CHARACTERS * 6 / size)
    return [line for part in text.splitlines() for line in textwrap.wrap(part, limit)]


def legend_columns(labels: Iterable[str], width: float, size: float) -> int:
    """Count the columns of a legend that fit a width in inches, at a font size in points."""
    # A handle and the space around it are as wide as about six characters.
    widest = max(map(len, labels), default=0) + 6
    return max(1, int(width * _CHARACTERS * 6 / size / widest))


def save(figure: Any, stem: Path) -> list[Path]:
    """Write <stem>.png and <stem>.svg; equal figures yield equal bytes."""
    paths = []
    for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
        data = io.BytesIO()
        figure.savefig(data, format=kind, metadata=metadata)
        paths.append(stem.with_name(f"{stem.name}.{kind}"))
        atomic_write(paths[-1], data.getvalue())
    return paths


def save_table(stem: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    """Write the numbers behind a picture as <stem>.csv."""
    path = stem.with_name(f"{stem.name}.csv")
    atomic_write(path, csv_text(header, rows).encode())
    return path


def ticks(count: int, max_ticks: int = 16) -> range:
    """Place about `max_ticks` labels on an axis of `count`: every 1st, 2nd, 5th, 10th, ..."""
    steps = (base * 10**power for power in range(6) for base in (1, 2, 5))
    return range(0, count, next(step for step in steps if count <= max_ticks * step))


def shade(values: np.ndarray, low: float, high: float) -> tuple[np.ndarray, Any]:
    """Map values to colors (..., 3), LEFT_OUT where NaN; return the color bar's scale too."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize, to_rgb

    scale = ScalarMappable(Normalize(low, high), colormaps[MAP])
    colors = scale.to_rgba(np.nan_to_num(values, nan=low))[..., :3]
    colors[np.isnan(values)] = to_rgb(LEFT_OUT)
    return colors, scale


def line_style(at: int) -> dict[str, Any]:
    """Colour and dashes of the at-th line: two lines that share one differ in the other."""
    return {"color": LINES[at % len(LINES)], "linestyle": DASHES[at // len(LINES) % len(DASHES)]}
