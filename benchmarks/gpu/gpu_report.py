"""The report of run.py: one result file, from which the next call resumes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Measure the checkout that has this script.
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import result  # noqa: E402

# Fields of the machine that are versions.
_VERSIONS = ("headwise", "torch", "triton", "transformers", "python", "cuda", "driver")


def stored(file: Path, rehearsal: bool) -> dict[str, Any]:
    """The report of earlier calls, or an empty one.

    Returns:
        `machine` by field, `steps` by name, each with what it depends on and its rows, and whether
        it is a `rehearsal`.
    """
    if not file.exists():
        return {"command": "", "rehearsal": rehearsal, "machine": {}, "steps": {}}
    content = result.read(file)
    (settings,) = content.part("settings")
    if settings["rehearsal"] != rehearsal:
        raise SystemExit(
            f"{file} is{'' if settings['rehearsal'] else ' not'} of a rehearsal: "
            "choose another --out"
        )
    steps = {row["step"]: _bare(row, "step") for row in content.part("step")}
    for name, entry in steps.items():
        entry["rows"] = [_bare(row) for row in content.part(name)]
    (device,) = content.part("device")
    return {
        "command": content.command,
        "rehearsal": rehearsal,
        "machine": _bare(device) | content.versions,
        "steps": steps,
    }


def _bare(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("part", *names)}


def result_of(report: dict[str, Any]) -> result.Result:
    """The result file of a report: the device, a row for each step, and the rows of the steps."""
    machine = report["machine"]
    versions = {name: str(machine[name]) for name in _VERSIONS if machine.get(name) is not None}
    rows = result.labeled("settings", [{"rehearsal": report["rehearsal"]}])
    rows += result.labeled("device", [{k: v for k, v in machine.items() if k not in versions}])
    for name, entry in report["steps"].items():
        about = {field: value for field, value in entry.items() if field != "rows"}
        rows += result.labeled("step", [{"step": name, **about}])
        rows += result.labeled(name, entry["rows"])
    return result.Result(
        what="Headwise on one GPU: kernels, a search, prefills, tests, attention and decode",
        command=report["command"] or result.UNKNOWN,
        commit=result.commit(),
        machine=machine.get("device") or result.UNKNOWN,
        versions=versions,
        rows=[rounded(row) for row in rows],
    )


def text(report: dict[str, Any]) -> str:
    """The report as the file has it."""
    return result.text(result_of(report))


def write(file: Path, report: dict[str, Any]) -> None:
    """Replace the report as a whole, so that a kill leaves the earlier one."""
    result.write(file, result_of(report))


def rounded(value: Any) -> Any:
    """Floats with six digits."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return value
