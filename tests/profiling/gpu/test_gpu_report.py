"""The one command for a GPU, rehearsed in full on the CPU in Triton's interpreter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from artifacts import HeadwiseError
from profiling import gpu_report
from profiling.gpu import pytest_files, self_check, sweep
from profiling.gpu.steps import STEPS, Setting


def report(out: Path, *more: str) -> int:
    return gpu_report.main(["--out", str(out), *more])


def steps_of(out: Path) -> dict[str, Any]:
    steps: dict[str, Any] = json.loads((out / "report.json").read_text())["steps"]
    return steps


@pytest.mark.slow
def test_the_whole_report_rehearsed(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    out = tmp_path / "gpu"
    assert report(out, "--rehearse", "--minutes", "20") == 0
    steps = steps_of(out)
    small = Setting(device="cpu", dtype="float16", small=True)
    assert list(steps) == [step.name for step in STEPS if step.load().pieces(step.name, small)]
    for name, step in steps.items():
        assert not step["failed"] and not step["not_run"] and step["rows"], name
        assert len(step["table"]) > 1, name
    checks = steps["check"]["rows"].values()
    assert all(row["error"] <= row["allowed"] for row in checks)
    assert {kernel for row in checks for kernel in row["kernels"]} == self_check.kernel_names()
    page = (out / "report.md").read_text()
    assert "Nothing failed." in page and all(step["title"] in page for step in steps.values())
    assert (out / "launch.json").is_file()

    assert report(out, "--rehearse", "--minutes", "20") == 0
    assert {name: step["rows"] for name, step in steps_of(out).items()} == {n: s["rows"] for n, s in steps.items()}
    assert not any(step["seconds"] for step in steps_of(out).values())

    with pytest.raises(HeadwiseError, match=r"belongs to another run.*--fresh"):
        report(out, "--device", "cpu", "--minutes", "1")


@pytest.mark.slow
def test_what_there_is_no_time_for_is_done_by_the_next_run(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    how = ("--rehearse", "--steps", "device")
    assert report(tmp_path, *how, "--minutes", "0.001") == 0
    assert all(step["not_run"] and not step["rows"] for step in steps_of(tmp_path).values())
    assert "Not run for want of time: facts" in (tmp_path / "report.md").read_text()
    assert report(tmp_path, *how) == 0 and not any(step["not_run"] for step in steps_of(tmp_path).values())


def test_every_file_with_tests_for_a_gpu_is_run() -> None:
    tests = Path(__file__).parents[2]
    marked = {file for file in tests.rglob("test_*.py") if "pytest.mark.gpu" in file.read_text()} - {Path(__file__)}
    assert {str(file.relative_to(tests.parent)) for file in marked} == pytest_files.FILES.keys()


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--minutes", "0"], "--minutes must be above 0, got 0.0"),
        (["--model", "smollm2"], "--model and --artifact go together"),
        (["--steps", "nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, typed: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        gpu_report.main(["--out", str(tmp_path / "out"), *typed])
    except (HeadwiseError, SystemExit) as error:
        assert message in (str(error) if isinstance(error, HeadwiseError) else capsys.readouterr().err)
    else:
        pytest.fail("nothing was raised")
    assert not (tmp_path / "out").exists()


def test_no_gpu_is_said_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(HeadwiseError, match="the device cuda cannot be used: RuntimeError: torch finds no GPU"):
        gpu_report.main(["--out", str(tmp_path)])
    assert not (tmp_path / "report.json").exists()


def test_every_candidate_is_a_build_of_its_sort() -> None:
    for sort in sweep.SORTS:
        for dim in (64, 128, 256):
            found = sweep.candidates(sort, dim)
            assert len(set(found)) == len(found)
            assert all(128 % build.keys == 0 and (sort == "paired" or build.rows == 1) for build in found)
    setting = Setting()
    for piece in sweep.pieces("sweep", setting):
        sort, dim, *words = piece.split()
        assert sweep.build_of(words) in sweep.candidates(sort, int(dim))
    assert sweep.pieces("builds", setting) == [f"compile {piece}" for piece in sweep.pieces("sweep", setting)]


def row(sort: str, seconds: float, table: float, *, own: bool = False, **build: Any) -> dict[str, Any]:
    fields = {
        "rows": 1, "keys": 64, "warps": 4, "stages": 3, "precision": "ieee", "registers": None, "descriptors": False,
        **build,
    }  # fmt: skip
    return {
        "sort": sort, "dim": 128, "build": fields, "target": "sm_90", "own": own, "seconds": seconds,
        "table_seconds": table, "flops": 1e9,
    }  # fmt: skip


def test_the_fastest_builds_are_kept_where_they_are_clearly_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels.attention import triton_tuned
    from profiling.gpu import builds_kept

    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    rows = {
        "a": row("paired", 0.9, 1.0, rows=2, warps=8), "b": row("paired", 1.0, 1.0, own=True),
        "c": row("lists", 0.99, 1.0, stages=4),
    }  # fmt: skip
    kept = builds_kept.keep(rows, {"device": "NVIDIA H100 80GB HBM3"}, tmp_path, Setting())
    assert kept is not None and len(kept["lines"]) == 3
    assert kept["lines"][0].endswith("1.11 times as fast as the table's")
    assert kept["lines"][2] == "# lists, head dim 128: the table's build stays"
    file = triton_tuned.path("NVIDIA H100 80GB HBM3")
    assert str(file) == kept["file"] and file.read_text() == (tmp_path / "launch.json").read_text()
    ((place, build),) = triton_tuned.read(file).items()
    assert place == ("paired", 128, False) and (build.rows, build.warps) == (2, 8)
    assert builds_kept.keep({}, {"device": "x"}, tmp_path, Setting()) is None
    # One that reads by descriptors is kept beside the fastest of those that every call can take, if it is the faster.
    for seconds, kept_too in ((0.7, True), (0.95, False)):
        more = rows | {"d": row("paired", seconds, 1.0, rows=2, warps=8, descriptors=True)}
        builds_kept.keep(more, {"device": "NVIDIA H100 80GB HBM3"}, tmp_path, Setting())
        assert set(triton_tuned.read(file)) == {("paired", 128, False), *[("paired", 128, True)] * kept_too}
