"""The check of interpreted kernels' memory finds its faults; every case runs under it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_each_fault_is_found() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.wrong_kernels"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["right"] == ""
    assert "reads_beyond: program 2 reads outside of the call's tensors" in said["reads_beyond"]
    assert "writes_before: program 0 writes outside of the call's tensors" in said["writes_before"]
    assert "writes_twice: programs 0 and 1 write the same element" in said["writes_twice"]
    assert "reads what program" in said["reads_another_s"]
