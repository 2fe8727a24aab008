"""Changes that were tried without gain."""

from __future__ import annotations

from typing import Any

from .table import Results, markdown, matching, table

_UNITS = {
    "ratio": "{:.2f}x",
    "percent": "{:+.2%}",
    "number": "{:.3f}",
    "signed": "{:+.2f}",
    "count": "{:,.0f}",
    "seconds": "{:.2f}",
}


@table("tried")
def tried_table(results: Results) -> str:
    """A row for each change that was built, measured and removed."""
    file = results["tried"].rows
    rows = []
    for what, metric in dict.fromkeys((row["what"], row["metric"]) for row in file):
        own = matching(file, what=what, metric=metric)
        cells = [str(what), str(metric), "; ".join(map(_result, own))]
        values = [
            _UNITS[row["unit"]].format(row["baseline_value"])
            for row in own
            if "baseline_value" in row
        ]
        baseline = ", ".join([*values, own[0]["baseline"]])
        rows.append([*cells, baseline, own[0]["commit"]])
    return markdown(["what", "metric", "result", "baseline", "commit"], rows)


def _result(row: dict[str, Any]) -> str:
    spec = _UNITS[row["unit"]].format
    parts = [f"{row['variant']}:"] if row["variant"] else []
    if row["value"] is None:
        parts.append(f"{spec(row['low'])} to {spec(row['high'])}")
    else:
        parts.append(spec(row["value"]))
        if row["low"] is not None:
            parts.append(f"({spec(row['low'])} to {spec(row['high'])})")
    return " ".join(parts)
