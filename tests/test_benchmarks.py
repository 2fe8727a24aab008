"""The scripts of benchmarks/ start, and what measures a GPU runs on the CPU by Triton's
interpreter."""

from __future__ import annotations

import json
import runpy
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


@pytest.mark.parametrize("script", SCRIPTS, ids=SCRIPT_NAMES)
def test_the_scripts_say_what_they_take(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(script.parent)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert not ended.value.code and capsys.readouterr().out.startswith("usage:")


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps",
    [
        ("device", "decode"),
        # Kernels are interpreted in tests/conformance as well.
        pytest.param(("kernels", "attention", "model"), marks=pytest.mark.exhaustive),
    ],
)
def test_what_measures_a_gpu_is_rehearsed(tmp_path, steps):
    pytest.importorskip("triton", reason="triton is not installed")
    script = ROOT / "benchmarks/gpu/run.py"
    command = [sys.executable, str(script), "--out", str(tmp_path), "--rehearse", "--steps", *steps]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "report.json").read_text())["steps"]
    assert tuple(found) == steps
    for step, result in found.items():
        assert result["torch" if step == "device" else "rows"]
        if step == "kernels":
            assert all(row["error"] <= row["allowed"] for row in result["rows"].values())
