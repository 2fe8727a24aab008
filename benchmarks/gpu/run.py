"""Headwise's kernels on this GPU, in minutes: right, and how fast.

    python benchmarks/gpu/run.py --out build/gpu

Each step runs in a separate process, so that a crash costs that step alone: the device and its
rates; every kernel once against the reference; the tests marked `core`; a whole default search of
a 1B shape at 4,096 tokens; attention at 8K to 128K with the published sizes against the fastest of
torch's dense kernels; decode; prefills of a 1B and an 8B shape. FOLDER/report.json has the
figures, with device and versions. --rehearse runs the same on the CPU in Triton's interpreter, at
tiny sizes: its times mean nothing."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
STEPS = ("device", "kernels", "tests", "search", "attention", "decode", "model")
TESTS = (
    *("-m", "gpu and core", "tests/kernels/test_gpu.py"),
    "tests/conformance/test_kernel_backends.py",
    "tests/conformance/test_gradient_backends.py",
)
REHEARSED_TESTS = ("-k", "scales_sizes", "tests/kernels/test_patterns.py")
PACKAGES = ("headwise", "torch", "triton", "transformers")
LENGTHS = (8192, 32_768, 131_072)
# Environment of a rehearsal's processes.
INTERPRETED = {
    "TRITON_INTERPRET": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


def parser() -> argparse.ArgumentParser:
    """The script's command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder of the report")
    p.add_argument(
        "--steps", nargs="+", choices=STEPS, default=STEPS, metavar="STEP", help=", ".join(STEPS)
    )
    p.add_argument(
        "--lengths", nargs="+", type=int, default=LENGTHS, metavar="N", help="tokens that are timed"
    )
    p.add_argument("--minutes", type=float, default=8, help="of a step, at most (default 8)")
    p.add_argument("--device", default="cuda")
    p.add_argument("--rehearse", action="store_true", help="on the CPU, interpreted, at tiny sizes")
    p.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    return p


def main() -> int:
    """Run the steps; 3 where one failed."""
    options = parser().parse_args()
    if options.in_process:
        (step,) = options.steps
        print(json.dumps(measured(step, options.device, options.rehearse, options.lengths)))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"command": sys.argv, "rehearsal": options.rehearse, "steps": {}}
    for step in options.steps:
        print(f"{step} ...", flush=True)
        report["steps"][step] = run_step(step, options)
        print(json.dumps(report["steps"][step], indent=1)[:4000], flush=True)
        (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    failed = [step for step, result in report["steps"].items() if "failed" in result]
    print(f"wrote {options.out / 'report.json'}")
    if failed:
        print(f"failed: {', '.join(failed)}")
        return 3
    return 0


def run_step(step: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a step in a separate process; return its result, or the reason why it failed."""
    path = [str(ROOT)]
    if "PYTHONPATH" in os.environ:
        path.append(os.environ["PYTHONPATH"])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    if options.rehearse:
        environment |= INTERPRETED
    if step == "tests":
        tests = TESTS
        if options.rehearse:
            tests = REHEARSED_TESTS
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    else:
        command = [sys.executable, __file__, "--out", str(options.out), "--in-process"]
        command += ["--steps", step, "--device", options.device]
        command += ["--lengths", *map(str, options.lengths)]
        if options.rehearse:
            command.append("--rehearse")
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60 * options.minutes,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {options.minutes:g} minutes"}
    (options.out / f"{step}.log").write_text(done.stdout + done.stderr)
    lines = done.stdout.strip().splitlines()
    if step == "tests":
        last = "pytest printed nothing"
        if lines:
            last = lines[-1]
        if done.returncode:
            return {"failed": last}
        return {"result": last}
    if done.returncode:
        errors = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        return {"failed": errors[-1]}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def measured(
    step: str, device: str, small: bool, lengths: Sequence[int] = LENGTHS
) -> dict[str, Any]:
    """The figures of a step, in this process."""
    # Measure the checkout that has this script.
    sys.path.insert(0, str(ROOT))
    import checks
    import speed
    import torch
    import whole_search

    if small:
        device = "cpu"
        sizes = speed.rehearsed_sizes()
        inputs = checks.Inputs(device=device, dtype=torch.float16, length=130, head_dim=64)
        names = checks.REHEARSED
    else:
        if not torch.cuda.is_available():
            raise SystemExit("torch finds no GPU; --rehearse runs the same on the CPU")
        sizes = speed.measured_sizes(lengths)
        inputs = checks.Inputs(device=device)
        names = tuple(checks.CHECKS)
    with ExitStack() as stack:
        if small:
            stack.enter_context(as_on_gpu())
        if step == "device":
            return {**facts(device), **speed.rates(device, sizes)}
        if step == "kernels":
            result = checks.run(inputs, names)
            wrong = [name for name, row in result["rows"].items() if "failed" in row]
            if wrong:
                result["failed"] = ", ".join(wrong)
            return result
        if step == "search":
            return {"rows": whole_search.search(device, sizes)}
        run = {"attention": speed.attention, "decode": speed.decode, "model": speed.model}[step]
        return {"rows": run(device, sizes)}


def as_on_gpu() -> ExitStack:
    """Have Triton's interpreter serve what Triton serves on a GPU, and no native code."""
    from kernels.registry import BACKENDS

    def order(op: str, device: str) -> tuple[str, ...]:
        return tuple(name for name in ("triton", "reference") if op in BACKENDS[name].ops)

    stack = ExitStack()
    stack.enter_context(mock.patch("kernels.registry.order", order))
    return stack


def facts(device: str) -> dict[str, Any]:
    """Device, its capability and memory, and versions."""
    import torch

    record: dict[str, Any] = {"device": "cpu", "python": platform.python_version()}
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        record = {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda or torch.version.hip,
            "python": platform.python_version(),
        }
    for name in PACKAGES:
        try:
            record[name] = version(name)
        except PackageNotFoundError:
            record[name] = None
    return record


if __name__ == "__main__":
    sys.exit(main())
