"""Collect what searches have proven and measured, from their artifacts.

    python benchmarks/searches.py cfg.yaml other.yaml --minutes 8.1 19.5 --out FILE.json

Each artifact is a row: what its search spent, the losses with their bounds, and the seconds to the
first token.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from checkout import commit

from artifacts import Artifact, HeadwiseError, load
from artifacts.cli.command import run_command
from artifacts.files import atomic_write, check_writable

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
    rows = [row_of(artifact, taken) for artifact, taken in zip(artifacts, minutes, strict=True)]
    measured = [each for artifact in artifacts for each in artifact.evidence.measurements]
    record = {
        "what": "Searches by the limits: losses with their bounds, and seconds to the first token",
        "command": "python benchmarks/searches.py ARTIFACT ... --out FILE",
        "commit": commit(),
        "machine": ", ".join(dict.fromkeys(each.device for each in measured if each.device)),
        "versions": dict(measured[0].versions or {}) if measured else {},
        "rows": rows,
    }
    atomic_write(options.out, (json.dumps(record, indent=1) + "\n").encode())
    return 0


def row_of(artifact: Artifact, minutes: float | None) -> dict[str, Any]:
    """The row of one artifact.

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
    row["tasks"] = [task.model_dump(mode="json") for task in artifact.evidence.tasks]
    return row


if __name__ == "__main__":
    run_command(lambda _: main())
