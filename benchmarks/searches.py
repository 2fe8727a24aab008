"""Collect what searches have proven and measured, from their artifacts.

    python benchmarks/searches.py cfg.yaml other.yaml --minutes 8.1 19.5 --out FILE.json

Each artifact is a row: what its search spent, the losses with their bounds, and the seconds to the
first token.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from result import UNKNOWN, Result, commit, labeled, write

from artifacts import Artifact, HeadwiseError, load
from artifacts.cli.command import run_command
from artifacts.files import check_writable

_FIRST_TOKEN = "seconds to the first token"


def parser() -> argparse.ArgumentParser:
    """The script's command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("files", type=Path, nargs="+", metavar="ARTIFACT")
    p.add_argument(
        "--minutes", type=float, nargs="+", default=[], help="of the searches, in this order"
    )
    p.add_argument("--out", type=Path, required=True, metavar="FILE")
    return p


def main() -> int:
    """Write the result file."""
    options = parser().parse_args()
    check_writable(options.out)
    minutes = options.minutes or [None] * len(options.files)
    if len(minutes) != len(options.files):
        raise HeadwiseError(
            f"--minutes takes a number for each of {len(options.files)} artifacts, got "
            f"{len(minutes)}"
        )
    artifacts = [load(path) for path in options.files]
    rows = [
        row
        for artifact, taken in zip(artifacts, minutes, strict=True)
        for row in rows_of(artifact, taken)
    ]
    measured = [each for artifact in artifacts for each in artifact.evidence.measurements]
    machines = ", ".join(dict.fromkeys(each.device for each in measured if each.device))
    result = Result(
        what="Searches by the limits: losses with their bounds, and seconds to the first token",
        command="python benchmarks/searches.py ARTIFACT ... --out FILE",
        commit=commit(),
        machine=machines or UNKNOWN,
        versions=dict(measured[0].versions or {}) if measured else {},
        rows=rows,
    )
    write(options.out, result)
    return 0


def rows_of(artifact: Artifact, minutes: float | None) -> list[dict[str, Any]]:
    """The row of one artifact, and a row for each of its tasks.

    Raises:
        HeadwiseError: no search has written it.
    """
    search = artifact.search
    verdict = artifact.evidence.verdict
    if search is None or verdict is None:
        raise HeadwiseError(f"the artifact of {artifact.model.name} has no search with a verdict")
    row: dict[str, Any] = {
        "model": artifact.model.name,
        "tokens": search.calibration.length,
        "dtype": search.dtype,
        "seed": search.seed,
        "minutes": minutes,
        "spent": search.spent,
        "density": round(search.summary.density, 4),
        "winners": dict(search.summary.winners),
        "content_sha256": artifact.content_sha256,
        "verdict": verdict.model_dump(mode="json"),
    }
    for each in artifact.evidence.measurements:
        if each.name == _FIRST_TOKEN:
            row["first_token"] = {
                "dense": round(each.baseline or 0.0, 3),
                "headwise": round(each.value, 3),
                "speedup": round((each.baseline or 0.0) / each.value, 3),
                "rounds": each.samples,
            }
    search_of = {name: row[name] for name in ("model", "tokens", "seed")}
    tasks = [{**search_of, **task.model_dump(mode="json")} for task in artifact.evidence.tasks]
    return labeled("row", [row]) + labeled("tasks", tasks)


if __name__ == "__main__":
    run_command(lambda _: main())
