"""Write the tables and the chart of speed and accuracy, from docs/results/*.json.

    python benchmarks/chart.py

writes docs/compared.md, a row for each artifact with its speed and its accuracy, which pages of
docs/ include, and the same table in README.md; docs/first_token.md, the seconds of artifacts of
earlier searches; and docs/compared.png.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/results"
QWEN = "Qwen2.5-Coder-0.5B"
SMOLLM2 = "SmolLM2-135M"
# Rows of the first table: model, result file of openvino.py.
COMPARED = (
    (SMOLLM2, "smollm2_8192_compared"),
    (QWEN, "qwen_0.5b_4096_compared"),
    (QWEN, "qwen_0.5b_8192_compared"),
    (QWEN, "qwen_0.5b_16384_compared"),
)
DENSE = ("dense", "dense_kernel", "openvino")
XATTENTION = "xattention_0.95"
HEADWISE = "headwise"
# Panels of the chart, by result file.
CHARTED = ("qwen_0.5b_4096_compared", "qwen_0.5b_8192_compared", "qwen_0.5b_16384_compared")
# Of Okabe and Ito, which color-blind readers can tell apart.
COLORS = {"dense": "#999999", HEADWISE: "#0072B2", "xattention": "#E69F00", "other": "#CC79A7"}
COMPARED_CAPTION = """\
Prompts that no search saw, on two CPU cores of an AMD EPYC (Zen 5), in bfloat16.

- *First token*: median seconds over the prompts. *Dense* is the faster of Headwise's dense kernel
  and OpenVINO. PyTorch's sdpa was left out: its attention takes about 5 times as long here.
  *XAttention* is OpenVINO's sparse attention at its threshold of 0.95.
- *Correct*: an answer is correct if each of its tokens has p > 0.5. *Lost*: part of dense
  attention's correct answers, of the same engine and prompts; in brackets 95% intervals over the
  prompts. *Proven*: the bound that the search itself proves, by other prompts.
- The number of tokens links to the measurements.
"""
# Columns of the second table, by a method's name in the records.
METHODS = {
    "dense": "sdpa",
    "dense_kernel": "dense, our kernel",
    "openvino": "OpenVINO dense",
    "xattention": "OpenVINO XAttention",
    HEADWISE: "Headwise",
}
# Its rows: model, processor, result file, and the record in a file that holds several.
EARLIER = (
    (QWEN, "EPYC Zen 4", "qwen_0.5b_first_token", "8192"),
    (QWEN, "EPYC Zen 4", "qwen_0.5b_first_token", "16384"),
    (QWEN, "EPYC Zen 4", "qwen_0.5b_first_token", "32768"),
    (SMOLLM2, "Granite Rapids (AMX)", "smollm2_first_token_printed", "granite_rapids_8192"),
    (SMOLLM2, "EPYC Zen 5", "smollm2_8192_rivals", None),
    (SMOLLM2, "EPYC Zen 4", "smollm2_8192_rivals_zen4", None),
    (SMOLLM2, "EPYC Zen 3 (float32)", "smollm2_first_token_printed", "zen3_8192"),
    (SMOLLM2, "Granite Rapids (AMX)", "smollm2_first_token_printed", "granite_rapids_32768"),
    (SMOLLM2, "EPYC Zen 5", "smollm2_32768_rivals", None),
    (SMOLLM2, "EPYC Zen 4", "smollm2_32768_rivals_zen4", None),
)
EARLIER_CAPTION = """\
Time to first token in seconds, on two CPU cores, in bfloat16 unless a row names float32. An empty
cell was not measured.

- *sdpa* is PyTorch's dense attention. *dense, our kernel* is Headwise's. *XAttention* is sparse, at
  its threshold of 0.9.
- The last column is the fastest dense time divided by Headwise's. Where several rounds were timed,
  it is the median of their ratios, which can differ a little from the ratio of the cells.
- The name of each processor links to its measurements.
"""
BEGIN = "<!-- compared -->"
END = "<!-- end of compared -->"


def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Rows of one result file of openvino.py.

    Attributes:
        model: name in the table.
        file: name of the result file.
        tokens: length of the prompts.
        methods: the file's row of each method.
        proven: the bound that the artifact's search has proven; None without one.
    """

    model: str
    file: str
    tokens: int
    methods: dict[str, dict[str, Any]]
    proven: float | None

    @property
    def fastest(self) -> str:
        """Name of the fastest dense attention."""
        over = self.methods[HEADWISE]["over"]
        return min(over, key=lambda name: over[name])

    def loss(self, method: str) -> dict[str, Any]:
        """The loss of a method against dense attention of the same engine."""
        lost: dict[str, dict[str, Any]] = self.methods[method]["lost"]
        if method == "openvino" or method.startswith("xattention"):
            return lost["openvino"]
        return lost["dense"] if "dense" in lost else lost["dense_kernel"]


def compared() -> list[Compared]:
    """Read the rows of the first table from the result files."""
    rows = []
    for model, name in COMPARED:
        record = _read(name)
        rows.append(
            Compared(
                model=model,
                file=f"{name}.json",
                tokens=record["tokens"],
                methods={row["method"]: row for row in record["rows"]},
                proven=record["artifacts"][HEADWISE]["lost_high"],
            )
        )
    return rows


def compared_table(rows: list[Compared], folder: str = "results/") -> str:
    """Return the rows as a Markdown table under its caption.

    Args:
        rows: of the table.
        folder: where the result files are, seen from the page.
    """
    header = ["model", "tokens", "first token, s: dense", "XAttention", "Headwise", "speedup"]
    header += ["correct, dense", "lost by XAttention", "lost by Headwise", "proven"]
    lines = [COMPARED_CAPTION, _line(header), "|---" * len(header) + "|"]
    for row in rows:
        own = row.methods[HEADWISE]
        dense = row.methods["dense" if "dense" in row.methods else "dense_kernel"]
        cells = [row.model, f"[{row.tokens:,}]({folder}{row.file})"]
        for name in (row.fastest, XATTENTION, HEADWISE):
            cells.append(_seconds(row.methods[name]["seconds"]["median"]))
        cells.append(f"{own['over'][row.fastest]:.2f}x")
        cells.append(f"{dense['correct']:,} of {dense['answers']:,}")
        cells += [_loss(row.loss(name)) for name in (XATTENTION, HEADWISE)]
        cells.append("" if row.proven is None else f"at most {row.proven:.1%}")
        lines.append(_line(cells))
    return "".join(f"{line}\n" for line in lines)


def _loss(loss: dict[str, Any]) -> str:
    return f"{loss['value']:.1%} ({loss['low']:.1%} to {loss['high']:.1%})"


def with_table(page: str, rows: list[Compared], folder: str = "docs/results/") -> str:
    """Return a page with the first table between its two markers, BEGIN and END."""
    before, _, rest = page.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the page must have the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{compared_table(rows, folder)}{END}{after}"


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


def earlier() -> list[Row]:
    """Read the rows of the second table from the result files."""
    return [_row(*each) for each in EARLIER]


def _row(model: str, processor: str, name: str, key: str | None) -> Row:
    record = _read(name)
    if key is not None:
        record = record["records"][key]
    by_method = {each["method"]: each for each in record["rows"]}
    seconds = {method: each["seconds"] for method, each in by_method.items()}
    fastest = min((method for method in DENSE if method in seconds), key=lambda m: seconds[m])
    # The median over the rounds, where the record has it.
    speedups = by_method[HEADWISE].get("speedups", {})
    return Row(
        model=model,
        processor=processor,
        file=f"{name}.json",
        tokens=record["settings"]["length"],
        seconds=seconds,
        speedup=speedups.get(fastest, seconds[fastest] / seconds[HEADWISE]),
    )


def earlier_table(rows: list[Row], folder: str = "results/") -> str:
    """Return the rows as a Markdown table under its caption.

    Args:
        rows: of the table.
        folder: where the result files are, seen from the page.
    """
    header = ["tokens", "model", "processor", *METHODS.values(), "speedup over fastest dense"]
    lines = [EARLIER_CAPTION, _line(header), "|---" * len(header) + "|"]
    for row in rows:
        cells = [f"{row.tokens:,}", row.model, f"[{row.processor}]({folder}{row.file})"]
        for method in METHODS:
            cells.append(_seconds(row.seconds[method]) if method in row.seconds else "")
        lines.append(_line([*cells, f"{row.speedup:.2f}x"]))
    return "".join(f"{line}\n" for line in lines)


def _line(cells: list[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def _seconds(seconds: float) -> str:
    """Three significant digits."""
    if seconds < 10:
        return f"{seconds:.2f}"
    if seconds < 100:
        return f"{seconds:.1f}"
    return f"{seconds:.0f}"


def draw(rows: list[Compared], out: Path) -> None:
    """Draw answers lost against seconds to the first token, a panel for each result file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(rows), figsize=(4.6 * len(rows), 4), layout="constrained"
    )
    # One marker for a method in all panels.
    labels = dict.fromkeys(_label(method) for row in rows for method in row.methods)
    markers = dict(zip(labels, "os^vDP*X", strict=False))
    shown: dict[str, Any] = {}
    for panel, row in zip(panels, rows, strict=True):
        shown |= _draw_panel(panel, row, markers)
        panel.set_title(f"{row.model}, {row.tokens:,} tokens", fontsize=10)
        panel.set_xlabel("seconds to the first token")
    panels[0].set_ylabel("correct answers lost, 95% interval")
    figure.legend(
        shown.values(), shown, loc="outside lower center", ncols=len(shown), frameon=False
    )
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
        label = _label(method)
        drawn[label] = panel.errorbar(
            figures["seconds"]["median"],
            loss["value"],
            yerr=[[loss["value"] - loss["low"]], [loss["high"] - loss["value"]]],
            fmt=markers[label],
            color=_color(method),
            capsize=3,
        )
    panel.axhline(0, color="#cccccc", linewidth=0.8, zorder=0)
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    panel.margins(x=0.15)
    panel.spines[["top", "right"]].set_visible(False)
    return drawn


def _label(method: str) -> str:
    if method in DENSE:
        return "dense"
    if method.startswith(HEADWISE):
        return method.replace("headwise@", "Headwise, ").replace("headwise", "Headwise")
    return method.replace("xattention_", "XAttention ")


def _color(method: str) -> str:
    if method in DENSE:
        return COLORS["dense"]
    return COLORS.get(method.partition("@")[0].partition("_")[0], COLORS["other"])


def main() -> None:
    """Write the tables and the chart."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.parse_args()
    rows = compared()
    (ROOT / "docs/compared.md").write_text(compared_table(rows), encoding="utf-8")
    (ROOT / "docs/first_token.md").write_text(earlier_table(earlier()), encoding="utf-8")
    readme = ROOT / "README.md"
    page = readme.read_text(encoding="utf-8")
    readme.write_text(with_table(page, rows), encoding="utf-8")
    charted = [row for row in rows if row.file.removesuffix(".json") in CHARTED]
    draw(charted, ROOT / "docs/compared.png")


if __name__ == "__main__":
    main()
