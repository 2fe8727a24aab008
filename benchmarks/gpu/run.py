"""Headwise's kernels on this GPU, in minutes: right, and how fast.

    python benchmarks/gpu/run.py

Each step runs in a separate process with a time limit of its own, the most valuable first.
FOLDER/report.json has the figures, with device and versions, in the form of docs/results; it is
written after each step, and rows of a step that was stopped are in it too. The same command
resumes: it runs the steps that are not finished for this code, this device and these lengths.
--steps runs steps anew.

A machine that is lent for ten minutes at a time: --minutes 9, twice. --rehearse runs the same on
the CPU in Triton's interpreter, at tiny sizes: its times mean nothing."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_report import stored, text, write

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (8192, 32_768, 131_072)
# Folders whose code a figure depends on.
CODE = ("artifacts", "benchmarks/gpu", "headwise", "kernels", "profiling", "runtime", "search")
SUFFIXES = {".py", ".cpp", ".h"}
# Minutes that a step of a rehearsal may take.
REHEARSED = 15.0
# Environment of a rehearsal's processes.
INTERPRETED = {
    "TRITON_INTERPRET": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step.

    Attributes:
        minutes: the most that it may take on a device.
        about: what it measures.
        by_length: --lengths are its lengths.
    """

    minutes: float
    about: str
    by_length: bool = False


# By worth: what was never measured on a GPU comes before what was.
STEPS = {
    "device": Step(minutes=1, about="versions, rates of a copy and of matrix products"),
    "kernels": Step(minutes=2, about="every kernel against the fp32 reference"),
    "search": Step(minutes=3.5, about="a search of a 1B shape at 4,096 tokens, served"),
    "model": Step(minutes=2.5, about="prefills of a 1B and an 8B shape", by_length=True),
    "tests": Step(minutes=1.5, about="the tests marked core"),
    "attention": Step(
        minutes=1.5, about="a layer by MInference's sizes, against torch", by_length=True
    ),
    "decode": Step(minutes=0.5, about="a token over all and over selected keys", by_length=True),
}


def parser() -> argparse.ArgumentParser:
    """The script's command line."""
    p = argparse.ArgumentParser(
        description=f"{__doc__}\n\n{plan(list(STEPS))}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder of the report (default build/gpu, of a rehearsal build/gpu-rehearsal)",
    )
    p.add_argument(
        "--steps", nargs="+", choices=STEPS, metavar="STEP", help="run these, also if finished"
    )
    p.add_argument(
        "--lengths", nargs="+", type=int, default=LENGTHS, metavar="N", help="tokens that are timed"
    )
    p.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="of all steps; a step is left for the next call if its limit does not fit",
    )
    p.add_argument(
        "--slower", type=float, default=1, metavar="X", help="multiplies the limit of each step"
    )
    p.add_argument("--device", default="cuda")
    p.add_argument("--rehearse", action="store_true", help="on the CPU, interpreted, at tiny sizes")
    p.add_argument("--in-process", choices=STEPS, help=argparse.SUPPRESS)
    return p


def plan(steps: list[str]) -> str:
    """The steps as lines of text, with the minutes that each may take on a device."""
    lines = ["minutes at most on a device:"]
    lines += [f"  {STEPS[name].minutes:4g}  {name:<10} {STEPS[name].about}" for name in steps]
    lines.append(f"  {sum(STEPS[name].minutes for name in steps):4g}  together")
    return "\n".join(lines)


def main() -> int:
    """Run the steps; 3 where one failed or is left."""
    options = parser().parse_args()
    if options.out is None:
        options.out = ROOT / "build" / ("gpu-rehearsal" if options.rehearse else "gpu")
    if options.in_process:
        from steps import measure

        measure(options.in_process, options)
        return 0
    # The step in progress ends with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "report.json"
    report = stored(file, options.rehearse)
    report |= {"command": " ".join(["python", "benchmarks/gpu/run.py", *sys.argv[1:]])}
    began = time.monotonic()
    left = []
    for name in to_run(options, report):
        limit = STEPS[name].minutes * options.slower
        if options.rehearse:
            limit = REHEARSED
        # A rehearsal's limit is never reached: its steps all start.
        if not options.rehearse and time.monotonic() - began + 60 * limit > 60 * options.minutes:
            left.append(name)
            continue
        print(f"{name}, at most {limit:g} minutes ...", flush=True)
        report["steps"][name] = run_step(name, limit, options, report)
        if name == "device":
            report["machine"] = dict(next(iter(report["steps"].pop(name)["rows"]), {}))
            if not report["machine"]:
                print((options.out / "device.log").read_text()[-2000:])
                return 3
        write(file, report)
    failed = [name for name, entry in report["steps"].items() if "failed" in entry]
    print(f"{file}:\n{text(report)}", end="")
    for name in failed:
        print(f"failed: {name}: {report['steps'][name]['failed']}")
    if left:
        print(f"left for the next call: {', '.join(left)}")
    return 3 if failed or left else 0


def to_run(options: argparse.Namespace, report: dict[str, Any]) -> Iterator[str]:
    """Yield the steps to run: those that were asked for, or those that are not finished.

    The device is always first: figures of another device are not resumed.
    """
    names = [name for name in STEPS if name in (options.steps or STEPS)]
    print(plan(names), flush=True)
    yield "device"
    for name in names:
        if name == "device":
            continue
        earlier = report["steps"].get(name, {})
        finished = "failed" not in earlier and earlier.get("of") == depends(name, options, report)
        if options.steps or not finished:
            yield name
        else:
            print(f"{name}: finished by an earlier call", flush=True)


def depends(name: str, options: argparse.Namespace, report: dict[str, Any]) -> dict[str, Any]:
    """What the figures of a step depend on."""
    of: dict[str, Any] = {"code": code(), "device": report["machine"].get("device")}
    if STEPS[name].by_length:
        of["lengths"] = list(options.lengths)
    return of


def code() -> str:
    """A digest of the code, which is the same with and without git."""
    digest = hashlib.sha256()
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def commit() -> str | None:
    """The commit of this checkout, None where git does not know it or files have changed."""
    git = ["git", "-C", str(ROOT)]
    try:
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    except OSError:
        return None
    if changes.returncode or changes.stdout or head.returncode:
        return None
    return head.stdout.strip()


def run_step(
    name: str, limit: float, options: argparse.Namespace, report: dict[str, Any]
) -> dict[str, Any]:
    """Run a step in a separate process; return its rows, and the reason if it failed.

    Rows go to STEP.jsonl as they come, all else to STEP.log: both survive a kill.
    """
    path = [str(ROOT)]
    if "PYTHONPATH" in os.environ:
        path.append(os.environ["PYTHONPATH"])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, __file__, "--in-process", name, "--out", str(options.out)]
    command += ["--device", options.device, "--lengths", *map(str, options.lengths)]
    if options.rehearse:
        environment |= INTERPRETED
        command.append("--rehearse")
    rows_file = options.out / f"{name}.jsonl"
    log_file = options.out / f"{name}.log"
    entry: dict[str, Any] = {
        "of": depends(name, options, report),
        "commit": commit(),
        "minutes": 0.0,
    }
    began = time.monotonic()
    with rows_file.open("w") as rows, log_file.open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=rows, stderr=log, process_group=0
        )
        try:
            status = process.wait(60 * limit)
            if status:
                entry["failed"] = reason(log_file.read_text()) or f"status {status}"
        except subprocess.TimeoutExpired:
            entry["failed"] = f"took more than {limit:g} minutes"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    entry["minutes"] = (time.monotonic() - began) / 60
    lines = rows_file.read_text().splitlines()
    # The last line of a process that was killed may be cut off.
    entry["rows"] = [json.loads(line) for line in lines if line.endswith("}")]
    return entry


def reason(log: str) -> str:
    """The last message of a log: its last line that is not indented, and those that follow it."""
    lines = log.strip().splitlines()
    starts = [at for at, line in enumerate(lines) if line[:1].strip()]
    return " ".join(line.strip() for line in lines[starts[-1] if starts else 0 :])[:600]


if __name__ == "__main__":
    sys.exit(main())
