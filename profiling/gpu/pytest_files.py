"""The tests that need a GPU (CONTRIBUTING, "With a GPU"), cut into pieces that end on their own.

A piece is every n-th test of a file: after a crash the others go on in another process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from profiling.gpu.steps import Rows, Setting

# A checkout has them beside this package; a wheel does not.
_ROOT = Path(__file__).parents[2]
# File -> how many pieces; what is worth most comes first. Most of the time goes into compiling: the cases of attention
# alone take some 300 builds, about 4 s of one core each.
FILES = {
    "tests/kernels/test_gpu.py": 36,
    "tests/kernels/test_gpu_decode.py": 12,
    "tests/runtime/test_gpu_offload.py": 2,
    "tests/runtime/caches/test_gpu_policies.py": 1,
    "tests/runtime/test_traffic.py": 1,
}
_KERNELS = "tests/kernels/"
# Of the kernels' files the few tests marked `core`, which come before anything is timed: each sort of build once.
_CORE = {"tests/kernels/test_gpu.py": 12, "tests/kernels/test_gpu_decode.py": 6}
# What shows on the CPU that the pieces run: two tests of one file.
_REHEARSED = "tests/kernels/test_growth.py"


def pieces(step: str, setting: Setting) -> list[str]:
    """See profiling.gpu.steps."""
    if not all((_ROOT / file).is_file() for file in FILES):
        return []
    if setting.small:
        return [f"{_REHEARSED} 0/20"]
    if step == "core":
        return [f"{file} {at}/{count} core" for file, count in _CORE.items() for at in range(count)]
    wanted = {file: n for file, n in FILES.items() if file.startswith(_KERNELS) == (step == "conformance")}
    return [f"{file} {at}/{count}" for file, count in wanted.items() for at in range(count)]


class _Slice:
    """A plugin of pytest that leaves every n-th test, and keeps what came of them."""

    def __init__(self, at: int, count: int) -> None:
        self.at, self.count = at, count
        self.outcomes: dict[str, str] = {}
        self.messages: list[str] = []

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Called by pytest when the tests are known."""
        kept = items[self.at :: self.count]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called by pytest after each part of a test."""
        if report.failed or report.when == "call" or report.skipped:
            self.outcomes[report.nodeid] = report.outcome
        if report.failed:
            last = next((line for line in reversed(str(report.longrepr).splitlines()) if line.startswith("E ")), "")
            self.messages.append(f"{report.nodeid.rpartition('::')[2]}: {last[2:].strip()}")


def run(piece: str, setting: Setting) -> dict[str, Any]:
    """How many passed and were skipped.

    Raises:
        RuntimeError: some failed; the first ones are named.
    """
    import pytest

    file, share, *which = piece.split()
    at, count = (int(part) for part in share.split("/"))
    mark = "" if setting.small else f"gpu and {which[0]}" if which else "gpu and not core"
    part = _Slice(at, count)
    os.chdir(_ROOT)
    status = pytest.main(["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", mark, file], plugins=[part])
    found = {name: list(part.outcomes.values()).count(name) for name in ("passed", "skipped", "failed")}
    if part.messages or status not in (0, 5):
        said = "; ".join(part.messages[:3]) or f"pytest ended with status {int(status)}"
        raise RuntimeError(f"{found['failed']} of {len(part.outcomes)} tests failed: {said}")
    return found


def lines(rows: Rows) -> list[Sequence[str]]:
    """A line for each file."""
    table: list[Sequence[str]] = [("tests", "passed", "skipped")]
    for file in dict.fromkeys(piece.split()[0] for piece in rows):
        mine = [row for piece, row in rows.items() if piece.split()[0] == file]
        table.append((file, *(str(sum(row[name] for row in mine)) for name in ("passed", "skipped"))))
    return table
