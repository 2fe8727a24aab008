"""The scripts of benchmarks/ start, and what measures a GPU runs on the CPU by Triton's
interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# kvpress_worker.py is started by kvpress.py, in an environment of its own.
# openvino_export.py is a part of openvino.py.
SCRIPT_NAMES = (
    "chart.py",
    "cpu_engines.py",
    "gpu/run.py",
    "kvpress.py",
    "openvino.py",
    "vllm_server.py",
    "vllm_ttft.py",
)
SCRIPTS = [ROOT / "benchmarks" / name for name in SCRIPT_NAMES]


def test_the_scripts_say_what_they_take() -> None:
    """In one process, for all import torch."""
    code = """
import runpy, sys
from pathlib import Path
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as done:
        assert not done.code, script
    sys.path.pop(0)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *map(str, SCRIPTS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage:") == len(SCRIPTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps",
    [
        ("decode",),
        # Kernels are interpreted in tests/conformance as well.
        pytest.param(("device", "kernels", "attention", "model"), marks=pytest.mark.exhaustive),
    ],
)
def test_what_measures_a_gpu_is_rehearsed(tmp_path: Path, steps: tuple[str, ...]) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    script = ROOT / "benchmarks/gpu/run.py"
    command = [sys.executable, str(script), "--out", str(tmp_path), "--rehearse", "--steps", *steps]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "report.json").read_text())["steps"]
    assert tuple(found) == steps
    for step, result in found.items():
        if step == "device":
            assert result["torch"]
        elif step == "kernels":
            rows = result["rows"].values()
            assert rows and all(row["error"] <= row["allowed"] for row in rows)
        else:
            assert result["rows"]
