"""Draw the chart of speed and accuracy, docs/compared.png, from docs/results/*.json.

python benchmarks/chart.py
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from result_tables.first_token import (
    COMPARED,
    DENSE,
    HEADWISE,
    SMOLLM2,
    Compared,
    compared,
    label,
)
from result_tables.table import Results

ROOT = Path(__file__).resolve().parents[1]
# Panels beside each other.
COLUMNS = 2
# Of Okabe and Ito, which color-blind readers can tell apart.
COLORS = {"dense": "#999999", HEADWISE: "#0072B2", "xattention": "#E69F00", "other": "#CC79A7"}


def draw(rows: list[Compared], out: Path) -> None:
    """Draw answers lost against seconds to the first token, a panel for each result file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = -(-len(rows) // COLUMNS)
    figure, grid = pyplot.subplots(
        lines, COLUMNS, figsize=(5 * COLUMNS, 3.6 * lines), layout="constrained", squeeze=False
    )
    panels = list(grid.flat)
    for unused in panels[len(rows) :]:
        unused.set_visible(False)
    # One marker for a method in all panels.
    labels = dict.fromkeys(label(method) for row in rows for method in row.methods)
    markers = dict(zip(labels, "os^vDP*X", strict=False))
    shown: dict[str, Any] = {}
    for panel, row in zip(panels, rows, strict=False):
        shown |= _draw_panel(panel, row, markers)
        panel.set_title(f"{row.model}, {row.tokens:,} tokens", fontsize=10)
        panel.set_xlabel("seconds to the first token")
    for panel in grid[:, 0]:
        panel.set_ylabel("correct answers lost, 95% interval")
    figure.legend(shown.values(), shown, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(out, dpi=150)


def _draw_panel(panel: Any, row: Compared, markers: dict[str, str]) -> dict[str, Any]:
    """Draw the methods of a result with the markers of their labels; what was drawn, by label."""
    from matplotlib.ticker import PercentFormatter

    drawn = {}
    for method, figures in row.methods.items():
        if figures["seconds"] is None or (method in DENSE and method != row.fastest):
            continue
        loss = {"value": 0.0, "low": 0.0, "high": 0.0}
        if method not in DENSE:
            loss = row.loss(method)
        name = label(method)
        drawn[name] = panel.errorbar(
            figures["seconds"]["median"],
            loss["value"],
            yerr=[[loss["value"] - loss["low"]], [loss["high"] - loss["value"]]],
            fmt=markers[name],
            color=_color(method),
            capsize=3,
        )
    panel.axhline(0, color="#cccccc", linewidth=0.8, zorder=0)
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    panel.margins(x=0.15)
    panel.spines[["top", "right"]].set_visible(False)
    return drawn


def _color(method: str) -> str:
    if method in DENSE:
        return COLORS["dense"]
    return COLORS.get(method.partition("@")[0].partition("_")[0], COLORS["other"])


def main() -> None:
    """Draw the chart."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    results = Results()
    # SmolLM2 answers too few for a scale in common.
    charted = [(model, name) for model, name in COMPARED if model != SMOLLM2]
    draw([compared(results, name, model) for model, name in charted], ROOT / "docs/compared.png")


if __name__ == "__main__":
    main()
