"""Write the table and the chart of seconds to the first token, from docs/results/*.json.

    python benchmarks/chart.py

writes docs/first_token.md, which pages of docs/ include, the same table in README.md, and
docs/first_token.png.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/results"
# Column of each method, by its name in the records.
METHODS = {
    "dense": "sdpa",
    "dense_kernel": "dense, our kernel",
    "openvino": "OpenVINO dense",
    "xattention": "OpenVINO XAttention",
    "headwise": "Headwise",
}
DENSE = ("dense", "dense_kernel", "openvino")
# Of Okabe and Ito, which color-blind readers can tell apart.
COLORS = {
    "dense": "#999999",
    "dense_kernel": "#56B4E9",
    "xattention": "#E69F00",
    "headwise": "#0072B2",
}
CHARTED = "SmolLM2-135M"
QWEN = "Qwen2.5-Coder-0.5B"
# Rows of the table: model, processor, result file, and the record in a file that holds several.
ROWS = (
    (QWEN, "EPYC Zen 4", "qwen_0.5b_first_token", "8192"),
    (QWEN, "EPYC Zen 4", "qwen_0.5b_first_token", "16384"),
    (QWEN, "EPYC Zen 4", "qwen_0.5b_first_token", "32768"),
    (CHARTED, "Granite Rapids (AMX)", "smollm2_first_token_printed", "granite_rapids_8192"),
    (CHARTED, "EPYC Zen 5", "smollm2_8192_rivals", None),
    (CHARTED, "EPYC Zen 4", "smollm2_8192_rivals_zen4", None),
    (CHARTED, "EPYC Zen 3 (float32)", "smollm2_first_token_printed", "zen3_8192"),
    (CHARTED, "Granite Rapids (AMX)", "smollm2_first_token_printed", "granite_rapids_32768"),
    (CHARTED, "EPYC Zen 5", "smollm2_32768_rivals", None),
    (CHARTED, "EPYC Zen 4", "smollm2_32768_rivals_zen4", None),
)
CAPTION = """\
Time to first token in seconds, on two CPU cores, in bfloat16 unless a row names float32. An empty
cell was not measured.

- *sdpa* is PyTorch's dense attention. *dense, our kernel* is Headwise's. *XAttention* is sparse.
- The last column is the fastest dense time divided by Headwise's. Where several rounds were timed,
  it is the median of their ratios, which can differ a little from the ratio of the cells.
- The name of each processor links to its measurements.
"""
BEGIN = "<!-- first-token table -->"
END = "<!-- end of first-token table -->"


@dataclass(frozen=True, kw_only=True)
class Row:
    """Seconds to the first token of one model on one processor.

    Attributes:
        model: name in the table.
        processor: name in the table, with the dtype where it is not bfloat16.
        file: name of the result file.
        tokens: length of the prompt.
        seconds: by method; a method that was not measured is missing.
        speedup: of Headwise over the fastest dense method.
    """

    model: str
    processor: str
    file: str
    tokens: int
    seconds: dict[str, float]
    speedup: float


def rows() -> list[Row]:
    """Read the rows of the table from the result files."""
    return [_row(*each) for each in ROWS]


def _row(model: str, processor: str, name: str, key: str | None) -> Row:
    file = f"{name}.json"
    record: dict[str, Any] = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    if key is not None:
        record = record["records"][key]
    by_method = {each["method"]: each for each in record["rows"]}
    seconds = {method: each["seconds"] for method, each in by_method.items()}
    fastest = min((method for method in DENSE if method in seconds), key=lambda m: seconds[m])
    # The median over the rounds, where the record has it.
    speedups = by_method["headwise"].get("speedups", {})
    return Row(
        model=model,
        processor=processor,
        file=file,
        tokens=record["settings"]["length"],
        seconds=seconds,
        speedup=speedups.get(fastest, seconds[fastest] / seconds["headwise"]),
    )


def table(rows: list[Row], folder: str = "results/") -> str:
    """Return the rows as a Markdown table under its caption.

    Args:
        rows: of the table.
        folder: where the result files are, seen from the page.
    """
    header = ["tokens", "model", "processor", *METHODS.values(), "speedup over fastest dense"]
    lines = [CAPTION, _line(header), "|---" * len(header) + "|"]
    for row in rows:
        cells = [f"{row.tokens:,}", row.model, f"[{row.processor}]({folder}{row.file})"]
        cells += [_seconds(row.seconds.get(method)) for method in METHODS]
        lines.append(_line([*cells, f"{row.speedup:.2f}x"]))
    return "".join(f"{line}\n" for line in lines)


def _line(cells: list[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def _seconds(seconds: float | None) -> str:
    """Three significant digits; an empty cell for a method that was not measured."""
    if seconds is None:
        return ""
    if seconds < 10:
        return f"{seconds:.2f}"
    if seconds < 100:
        return f"{seconds:.1f}"
    return f"{seconds:.0f}"


def with_table(page: str, rows: list[Row], folder: str = "docs/results/") -> str:
    """Return a page with the table between its two markers, BEGIN and END."""
    before, _, rest = page.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the page must have the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table(rows, folder)}{END}{after}"


def draw(rows: list[Row], out: Path) -> None:
    """Draw a panel for each prompt length, with a group of bars for each processor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = sorted({row.tokens for row in rows})
    figure, panels = pyplot.subplots(1, len(lengths), figsize=(9, 3.6), layout="constrained")
    for panel, length in zip(panels, lengths, strict=True):
        _draw_panel(panel, [row for row in rows if row.tokens == length])
        panel.set_title(f"{length:,} tokens")
    panels[0].set_ylabel("seconds to the first token")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(COLORS), frameon=False)
    figure.savefig(out, dpi=150)


def _draw_panel(panel: Any, rows: list[Row]) -> None:
    width = 0.8 / len(COLORS)
    for number, (method, color) in enumerate(COLORS.items()):
        measured = [(group, row) for group, row in enumerate(rows) if method in row.seconds]
        lefts = [group - 0.4 + (number + 0.5) * width for group, _ in measured]
        heights = [row.seconds[method] for _, row in measured]
        bars = panel.bar(lefts, heights, width * 0.92, color=color, label=METHODS[method])
        panel.bar_label(bars, labels=[_seconds(height) for height in heights], fontsize=7)
    processors = [row.processor.replace(" (", "\n(") for row in rows]
    panel.set_xticks(range(len(rows)), processors, fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Write the table and the chart."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.parse_args()
    every = rows()
    (ROOT / "docs/first_token.md").write_text(table(every), encoding="utf-8")
    readme = ROOT / "README.md"
    page = readme.read_text(encoding="utf-8")
    readme.write_text(with_table(page, every), encoding="utf-8")
    draw([row for row in every if row.model == CHARTED], ROOT / "docs/first_token.png")


if __name__ == "__main__":
    main()
