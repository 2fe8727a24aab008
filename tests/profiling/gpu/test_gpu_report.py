"""The one command for a GPU, rehearsed in full on the CPU in Triton's interpreter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from artifacts import Artifact, Decode, HeadwiseError, OmniKV, Prefill, save
from kernels.patterns import LayerPlan, make
from kernels.patterns.dense import dense_index
from profiling import gpu_report
from profiling.gpu import builds, pytest_files, self_check, sweep, vllm_sparse
from profiling.gpu.page import page
from profiling.gpu.steps import STEPS, Setting
from profiling.models.loading import load_model
from runtime.fingerprint import fingerprint
from tests.search.conftest import save_tiny


def report(out: Path, *more: str) -> int:
    return gpu_report.main(["--out", str(out), *more])


def steps_of(out: Path) -> dict[str, Any]:
    steps: dict[str, Any] = json.loads((out / "report.json").read_text())["steps"]
    return steps


def model_of_ones_own(folder: Path) -> list[str]:
    """A tiny model and its artifact, as options."""
    loaded = load_model(str(save_tiny(folder / "tiny")))
    artifact = Artifact(
        model=fingerprint(loaded.model, name="tiny"),
        search=None,
        patterns={},
        prefill=Prefill(dense_below=64, layers=(None,) * 3),
        decode=Decode(omnikv=OmniKV(filter_layers=(0,), budget=0.5)),
    )
    save(artifact, folder / "cfg.yaml", {})
    return ["--model", str(folder / "tiny"), "--artifact", str(folder / "cfg.yaml")]


@pytest.mark.slow
def test_the_whole_report_rehearsed(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    out, how = tmp_path / "gpu", ["--rehearse", "--minutes", "20", *model_of_ones_own(tmp_path)]
    assert report(out, *how) == 0
    steps = steps_of(out)
    assert list(steps) == [step.name for step in STEPS]
    for name, step in steps.items():
        assert not step["failed"] and not step["not_run"] and step["rows"], name
        assert len(step["table"]) > 1, name
    checks = steps["check"]["rows"].values()
    assert all(row["error"] <= row["allowed"] for row in checks)
    assert {kernel for row in checks for kernel in row["kernels"]} == self_check.kernel_names()
    page = (out / "report.md").read_text()
    assert "Nothing failed." in page and all(step["title"] in page for step in steps.values())
    assert (out / "launch.json").is_file()

    assert report(out, *how) == 0
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
    setting, dims = Setting(), []
    for other in ("", "other "):
        for piece in (found := sweep.pieces(f"{other}sweep", setting)):
            sort, dim, *words = piece.split()
            assert sweep.build_of(words) in sweep.candidates(sort, int(dim))
            dims.append(int(dim))
        assert sweep.pieces(f"{other}builds", setting) == [f"compile {piece}" for piece in found]
    assert list(dict.fromkeys(dims)) == [128, 64, 256]


def test_the_launch_table_is_swept_before_attention_is_timed() -> None:
    order = [step.name for step in STEPS]
    assert order[:6] == ["device", "check", "core", "builds", "sweep", "attention"]
    assert order.index("attention") < order.index("conformance") < order.index("tests") < order.index("other sweep")
    rows = {"a": row("paired", 1.0, 1.0)}, {"b": row("lists", 1.0, 1.0)}
    steps = {"sweep": {"rows": rows[0]}, "device": {"rows": {"c": {}}}, "other sweep": {"rows": rows[1]}}
    assert sweep.timed(steps) == rows[0] | rows[1] and sweep.timed({"device": {"rows": {}}}) == {}


def row(sort: str, seconds: float, table: float, *, own: bool = False, **build: Any) -> dict[str, Any]:
    fields = {
        "rows": 1, "keys": 64, "warps": 4, "stages": 3, "precision": "ieee", "registers": None, "descriptors": False,
        **build,
    }  # fmt: skip
    return {
        "sort": sort, "dim": 128, "build": fields, "target": "sm_90", "own": own, "seconds": seconds,
        "table_seconds": table, "flops": 1e9,
    }  # fmt: skip


def test_the_time_model_stands_beside_what_was_measured() -> None:
    swept = {
        "a": row("paired", 2e-6, 3e-6, rows=2, warps=8), "b": row("paired", 3e-6, 3e-6), "c": row("lists", 5e-6, 5e-6),
    }  # fmt: skip

    def facts(letter: str, **more: Any) -> dict[str, Any]:
        return {"attention": {"launch": swept[letter]["build"], "predicted": {"flops": 1e15, "bound": "L2"}} | more}

    compiled = {
        "sm_90 128 attention: diagonals, columns": facts("a"),
        "sm_90 128 attention: diagonals, columns, parts": facts("b"),
        "sm_90 128 attention: lists": facts("c"),
        "sm_90 64 attention: lists": facts("c"),
        "sm_90 128 decode: all keys": {"split_kernel": {}},
    }
    head, *found = builds.beside_measured(compiled, swept)
    assert [line[0] for line in found] == ["paired", "lists"] and len(head) == len(found[0])
    assert found[0][2:] == ("rows 2, keys 64, warps 8, stages 3", "1000", "L2", "-", "500", "50%")
    # Half of the rate that the model names.
    assert builds.beside_measured(compiled, swept, 494.5e12)[1][5] == "500"
    assert builds.beside_measured(compiled, {}) == [head] == builds.beside_measured({}, swept)
    steps = {
        "sweep": {"rows": swept, "title": "Sweep"}, "predicted": {"rows": compiled, "title": "Builds"},
    }  # fmt: skip
    for step in steps.values():
        step |= {"failed": {}, "not_run": [], "table": []}  # type: ignore[assignment]
    record = {"environment": {"device": "x"}, "command": "", "setting": {"small": False}, "steps": steps}
    titles = [line for line in page(record).splitlines() if line.startswith("## ")]
    assert titles[0] == "## What the time model allows at most, and what was measured" and len(titles) == 3
    swept.clear()
    assert "time model" not in page(record)


@pytest.mark.parametrize("length", [640, 700])
def test_what_vllm_is_given_names_the_index_s_keys(length: int) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, length, 32), torch.randn(1, 2, length, 32)
    index = LayerPlan([make("vertical_slash", vertical=90, slash=130)] * 4, 2).build(q, k)
    given = vllm_sparse.entries(index)
    assert {x.dtype for x in given.values()} == {torch.int32}
    expected = index.to_mask()
    key, query = torch.arange(length), torch.arange(length)[:, None]
    for head in range(4):
        mask = torch.zeros(length, length, dtype=torch.bool)
        for at in range(given["block_count"].shape[-1]):
            tiles = given["block_offset"][0, head, at, : given["block_count"][0, head, at]]
            columns = given["column_index"][0, head, at, : given["column_count"][0, head, at]]
            assert bool((tiles.diff() > 0).all()) and int(tiles[-1]) == 64 * at
            held = torch.isin(key // 64 * 64, tiles)
            # Nothing is named twice: it would count twice.
            assert not bool(held[columns.long()].any()) and len(columns.unique()) == len(columns)
            held[columns.long()] = True
            mask[64 * at : 64 * (at + 1)] = held
        assert torch.equal(mask & (key <= query), expected[0, head])


def test_a_vllm_without_the_kernel_says_so() -> None:
    assert vllm_sparse.missing() is not None
    index = dense_index(1, 2, 70, 70, torch.device("cpu"))
    x = torch.zeros(1, 2, 70, 32)
    with pytest.raises(RuntimeError, match="vllm"):
        vllm_sparse.attention(x, x, x, index)


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
