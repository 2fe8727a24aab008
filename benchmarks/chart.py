"""Draw docs/first_token.png: seconds to the first token, from docs/results.md.

The table is the first of that page; `python benchmarks/chart.py` draws it anew.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Column of the table, and its colour: Okabe and Ito's, which colour-blind readers tell apart.
METHODS = {
    "sdpa": "#999999",
    "dense, our kernel": "#56B4E9",
    "OpenVINO XAttention": "#E69F00",
    "Headwise": "#0072B2",
}


def table(page: str) -> list[dict[str, str]]:
    """Return the rows of the page's first table, by column."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    header = _cells(lines[0])
    rows = []
    for line in lines[1:]:
        cells = _cells(line)
        if len(cells) != len(header):
            break
        rows.append(dict(zip(header, cells, strict=True)))
    return rows


def _cells(line: str) -> list[str]:
    text = re.sub(r" *\(\[file\]\([^)]*\)\)", "", line)
    return [cell.strip() for cell in text.strip("|").split("|")]


def draw(rows: list[dict[str, str]], out: Path) -> None:
    """Draw a panel a prompt length and a group of bars a processor; no figure, no bar."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = list(dict.fromkeys(row["tokens"] for row in rows))
    figure, panels = pyplot.subplots(1, len(lengths), figsize=(9, 3.6), layout="constrained")
    for panel, length in zip(panels, lengths, strict=True):
        groups = [row for row in rows if row["tokens"] == length]
        _draw_panel(panel, groups)
        panel.set_title(f"{length} tokens")
    panels[0].set_ylabel("seconds to the first token")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(METHODS), frameon=False)
    figure.savefig(out, dpi=150)


def _draw_panel(panel, groups: list[dict[str, str]]) -> None:
    width = 0.8 / len(METHODS)
    for number, (method, colour) in enumerate(METHODS.items()):
        for group, row in enumerate(groups):
            if row[method]:
                seconds = float(row[method])
                left = group - 0.4 + (number + 0.5) * width
                label = method if group == 1 else None
                bar = panel.bar(left, seconds, width * 0.92, color=colour, label=label)
                panel.bar_label(bar, fmt="%.3g", fontsize=7)
    processors = [row["processor"].replace(" (", "\n(") for row in groups]
    panel.set_xticks(range(len(groups)), processors, fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Read the table and draw it."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--out", type=Path, default=ROOT / "docs/first_token.png", help="default %(default)s"
    )
    given = p.parse_args()
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    draw(table(page), given.out)


if __name__ == "__main__":
    main()
