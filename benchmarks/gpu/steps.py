"""The steps of run.py, each in its process: rows go to stdout as they come, one a line."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
# Measure the checkout that has this script.
sys.path.insert(0, str(ROOT))

import checks  # noqa: E402
import speed  # noqa: E402
import torch  # noqa: E402
import whole_search  # noqa: E402

from kernels.patterns import Pattern  # noqa: E402
from kernels.registry import BACKENDS  # noqa: E402

TESTS = (
    *("-m", "gpu and core", "tests/kernels/test_gpu.py"),
    "tests/conformance/test_kernel_backends.py",
    "tests/conformance/test_gradient_backends.py",
)
REHEARSED_TESTS = ("-k", "scales_sizes", "tests/kernels/test_patterns.py")
PACKAGES = ("headwise", "torch", "triton", "transformers")

# Writes a row.
Emit = Callable[[dict[str, Any]], None]


def measure(step: str, options: argparse.Namespace) -> None:
    """Run a step; SystemExit names what failed."""
    rows = sys.stdout

    def emit(row: dict[str, Any]) -> None:
        print(json.dumps(row), file=rows, flush=True)

    device = options.device
    if options.rehearse:
        device = "cpu"
        sizes = speed.rehearsed_sizes()
        inputs = checks.Inputs(device=device, dtype=torch.float16, length=130, head_dim=64)
        names = checks.REHEARSED
        tests = REHEARSED_TESTS
    else:
        if not torch.cuda.is_available():
            raise SystemExit("torch finds no GPU; --rehearse runs the same on the CPU")
        sizes = speed.measured_sizes(options.lengths)
        inputs = checks.Inputs(device=device)
        names = tuple(checks.CHECKS)
        tests = TESTS
    steps: dict[str, Callable[[], None]] = {
        "device": lambda: emit({**facts(device), **speed.rates(device, sizes)}),
        "kernels": lambda: checks.run(inputs, names, emit),
        "search": lambda: whole_search.search(device, sizes, options.out, emit),
        "model": lambda: speed.model(device, sizes, emit),
        "tests": lambda: run_tests(tests, emit),
        "attention": lambda: speed.attention(device, sizes, emit),
        "decode": lambda: speed.decode(device, sizes, emit),
    }
    with ExitStack() as stack:
        # Whatever else is printed goes to the log.
        stack.enter_context(redirect_stdout(sys.stderr))
        if options.rehearse:
            stack.enter_context(as_on_gpu())
            if step == "search":
                whole_search.check_prompts(speed.measured_sizes(options.lengths))
        steps[step]()


class Outcomes:
    """A plugin of pytest that counts outcomes, and emits the tests that fail."""

    def __init__(self, emit: Emit) -> None:
        self.counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
        self._emit = emit

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a test's call, and a skip or an error before or after it."""
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
            if report.outcome == "failed":
                self._emit({"failed test": report.nodeid})


def run_tests(arguments: tuple[str, ...], emit: Emit) -> None:
    """Run tests in this process."""
    import pytest

    outcomes = Outcomes(emit)
    status = pytest.main(["-q", "-p", "no:cacheprovider", *arguments], plugins=[outcomes])
    emit(outcomes.counts)
    if status or not outcomes.counts["passed"]:
        raise SystemExit(f"pytest ended with {status!r}: {outcomes.counts}")


def as_on_gpu() -> ExitStack:
    """Have Triton's interpreter serve what Triton serves on a GPU, and no native code.

    A search has a few candidates of each kind, and times each of them once.
    """
    from search.model.candidates import candidate_grid

    def order(op: str, device: str) -> tuple[str, ...]:
        return tuple(name for name in ("triton", "reference") if op in BACKENDS[name].ops)

    def few(length: int) -> tuple[Pattern, ...]:
        every = candidate_grid(length)
        return tuple(dict.fromkeys((*every[::4], *every[-2:])))

    stack = ExitStack()
    stack.enter_context(mock.patch("kernels.registry.order", order))
    stack.enter_context(mock.patch("search.model.search.candidate_grid", few))
    stack.enter_context(mock.patch("profiling.speed.layer_times._ROUNDS", 0))
    return stack


def facts(device: str) -> dict[str, Any]:
    """Device, its capability and memory, and versions."""
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
