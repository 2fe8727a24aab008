"""Part of the page on the search: origin of the patterns, and points of the front."""

from __future__ import annotations

from collections.abc import Iterator

from artifacts.errors import number, plural
from artifacts.page.layout import aligned
from artifacts.schema.artifact import Artifact
from artifacts.schema.evidence import percent
from artifacts.schema.search import SearchInfo

Row = tuple[str, str]


def origin(artifact: Artifact) -> Iterator[Row]:
    """Import and search, as labels and texts."""
    if imported := artifact.prefill.imported:
        scores = {
            "recall": "its scores are recalls",
            "other": "its scores are no recalls",
            None: "without scores",
        }
        yield (
            "imported",
            f"{imported.file}, {imported.format}, {imported.sha256[:12]}; "
            f"{scores[imported.scores]}",
        )
    search = artifact.search
    if search is None:
        return
    summary = search.summary
    calibration = search.calibration
    searched = sum(len(row) for row in artifact.prefill.layers if row is not None)
    means = ", ".join(summary.means)
    yield (
        "search",
        f"{_how(search)}; {search.device}, {search.dtype}, {search.kernel_backend} kernels",
    )
    yield "", f"$ {search.command}"
    if len(calibration.tasks) > 1:
        suffix = " each"
    else:
        suffix = ""
    prompts = f"{plural(calibration.samples, 'prompt')}{suffix} of {calibration.length:,} tokens"
    yield "calibration", f"{', '.join(calibration.tasks)}, {prompts}"
    yield "budget", search.spending.removeprefix("budget ")
    yield "result", f"{means}; means over {plural(searched, 'head')}"


def _how(search: SearchInfo) -> str:
    parts = [f"headwise {search.tool_version}", f"preset {search.preset}"]
    if search.cost is not None and search.cost.unit == "seconds":
        parts.append(f"by seconds of {search.cost.device}")
    return ", ".join([*parts, f"seed {search.seed}"])


def lengths(artifact: Artifact) -> Iterator[Row]:
    """Length from which prefill is sparse, and the scaling of sizes with the length."""
    prefill = artifact.prefill
    sparse = (
        f"dense below {prefill.dense_below:,} tokens; the last "
        f"{prefill.dense_tail:,} queries see every key"
    )
    yield "prefill", sparse
    if prefill.length:
        yield "", f"sizes grow in proportion on prompts of more than {prefill.length:,} tokens"


def front(artifact: Artifact) -> list[str]:
    """Points of the front, the cheapest first, with a mark at the served point."""
    section = artifact.prefill.front
    if section is None:
        return []
    unit = {"seconds": " s", "flops": " FLOPs"}[section.unit]
    rows = [["", "attention", "speedup", "kl", "recall", "density", "at most lost"]]
    for point in section.points:
        figures = [
            f"{point.speedup:.2f}x",
            f"{point.kl:.4g}",
            f"{point.recall:.4f}",
            f"{point.density:.4f}",
        ]
        if point.lost is None:
            lost = "-"
        else:
            lost = percent(point.lost)
        if point.layers is None:
            mark = "*"
        else:
            mark = ""
        rows.append([mark, f"{number(point.cost)}{unit}", *figures, lost])
    return [
        f"front at {section.length:,} tokens (*: served by default)",
        *aligned(rows, indent=2),
        f"  attention: predicted; dense attention takes {number(section.dense_cost)}{unit}",
        f"  kl (nats a token) and recall: on {section.measured_on.replace('_', '-')} prompts",
        "  at most lost: correct answers, the upper bound of *, and predicted from it",
    ]
