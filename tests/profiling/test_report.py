"""The standing report: what fits the minutes, what is left out, and quality against time in words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from artifacts import HeadwiseError, load
from profiling import report
from profiling.evaluation.fronts import Front, Point, front_of, sentences
from profiling.evaluation.measure import evaluate
from profiling.prompts.settings import Setting
from search.published.config import HeadSearch
from search.published.head_budget import run
from tests.search.conftest import save_tiny

LENGTH = 900


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    model = save_tiny(folder / "tiny")
    run(
        HeadSearch(model=str(model), out=folder / "cfg.yaml", length=LENGTH, budget="0.8", dtype="float32", command="x")
    )
    return folder


def asked(searched: Path, out: Path, *more: str) -> list[str]:
    base = [str(searched / "cfg.yaml"), "--model", str(searched / "tiny"), "--out", str(out), "--dtype", "float32"]
    return [*base, "--length", str(LENGTH), "--methods", "headwise", "a_shape", "random_tiles", "--seeds", "2", *more]


def test_what_fits_is_measured_and_the_rest_is_named(
    searched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds: list[tuple[str, int, tuple[str, ...]]] = []

    def counted(config: Any, *given: Any) -> Any:
        rounds.append((config.tasks[0], config.samples, config.methods))
        return evaluate(config, *given)

    monkeypatch.setattr(report, "evaluate", counted)
    monkeypatch.setattr(report, "least_units", lambda looks: 3)
    monkeypatch.setattr(report, "FURTHER", ("random_tiles",))
    monkeypatch.setattr(report, "ROUNDS", (1, 2))
    out = tmp_path / "out"
    tasks = ("--task", "passkey", "--task", "babilong_qa1")
    # The first task is always run; after it the time is up.
    assert report.main(asked(searched, out, *tasks, "--minutes", "0.0001")) == 0
    record = json.loads((out / "evaluation.json").read_text())
    first, further = ("dense", "headwise", "a_shape"), ("random_tiles",)
    # Three prompts of two seeds: as many of each.
    assert rounds == [("passkey", 2, first)]
    assert record["left_out"]["what"] == [
        "babilong_qa1 at 900 tokens, 4 prompts",
        "passkey at 900 tokens, 4 prompts under random_tiles",
        "babilong_qa1 at 900 tokens, 4 prompts under random_tiles",
        "passkey at 900 tokens, 8 prompts",
        "babilong_qa1 at 900 tokens, 8 prompts",
        "passkey at 900 tokens, 8 prompts under random_tiles",
        "babilong_qa1 at 900 tokens, 8 prompts under random_tiles",
    ]
    html = (out / "index.html").read_text()
    assert "Left out of 0.0001 minutes: babilong_qa1 at 900 tokens, 4 prompts" in html
    assert "Prompts of seed 1000, 1001. Searched with seed: headwise 0." in html
    rounds.clear()
    assert report.main(asked(searched, out, *tasks, "--minutes", "30")) == 0
    assert rounds == [
        (task, samples, methods)
        for samples in (2, 4)
        for methods in (first, further)
        for task in ("passkey", "babilong_qa1")
    ]
    record = json.loads((out / "evaluation.json").read_text())
    assert record["left_out"]["what"] == []
    counts = {(f["task"], f["measure"]): f["count"] for f in record["figures"] if f["method"] == "random_tiles"}
    assert counts["passkey", "score"] == counts["babilong_qa1", "forced choice"] == 8
    assert all(len(f["by_seed"]) == 2 for f in record["figures"] if f["method"] == "random_tiles")
    timed = {each["method"] for each in record["prefill"]}
    assert timed == {"dense", "dense_kernel", "headwise", "a_shape"}, "what chooses by scores is not timed"
    (same,) = record["equal_time"]
    own, other = same["rows"]
    assert (own["name"], own["apart"], other["name"]) == ("headwise", None, "a_shape")
    assert other["low"] <= other["apart"] <= other["high"] and other["apart"] == pytest.approx(other["kl"] - own["kl"])
    assert 0 < other["p"] <= other["corrected"] and own["p"] is own["corrected"] is None
    assert set(same["dense_seconds"]) == {"dense", "dense_kernel"} and own["seconds"] > 0 < other["seconds"]
    html = (out / "index.html").read_text()
    assert "In the same time, 900 tokens" in html
    assert (
        "Quality against time" in html
        and "How many prompts it takes" in html
        and "Left out" not in html
        and "Too few prompts to tell from dense" in html
    )
    (out / "index.html").unlink()
    capsys.readouterr()
    assert report.main([str(out)]) == 0
    assert (out / "index.html").read_text() == html and "900 tokens" in capsys.readouterr().out


def test_tasks_and_lengths_are_the_models_settings(searched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = load(searched / "cfg.yaml")
    base = Setting(task="a", length=LENGTH, measure="score", count=9, dense=0.5, low=0.1, high=0.9, seconds=1.0)
    some = (
        base,
        replace(base, task="short", length=20),
        replace(base, task="hopeless", dense=0.0),
        replace(base, task="forced", dense=0.95, low=0.6, measure="choice", chance=0.5, difference=-0.1),
        replace(base, task="guessed", dense=0.5, low=0.2, measure="choice", chance=0.25, difference=-0.1),
        replace(base, task="given up", dense=0.95, low=0.6, measure="choice", chance=0.25),
    )
    monkeypatch.setattr(report, "settings", {"m": some, "smollm2": some[:1]}.__getitem__)
    places, left = report.places_of("m", artifact, (), ())
    assert places == [("prose", LENGTH), ("a", LENGTH), ("forced", LENGTH)]
    assert left == ["short at 20 tokens, which the artifact serves densely"]
    assert report.places_of("m", artifact, (), (600,))[0] == [(t, 600) for t in ("prose", "a", "short", "forced")]
    monkeypatch.setattr(report, "settings", {"new": (), "smollm2": some[:1]}.__getitem__)
    assert report.places_of("new", artifact, (), (600,))[0] == [("prose", 600), ("a", 600)]


def test_a_front_is_what_none_beats() -> None:
    points = [
        Point(method=m, value=v, seconds=s, verdict=t)
        for m, v, s, t in (
            ("fast", 0.3, 1.0, "worse"),
            ("good", 0.8, 2.0, ""),
            ("slow", 0.7, 3.0, ""),
            ("dense", 0.9, 4.0, ""),
            ("same", 0.9, 4.0, ""),
        )
    ]
    assert front_of(points, higher=True) == ("fast", "good", "dense", "same")
    assert front_of(points, higher=False) == ("fast",)
    found = Front(task="t", length=1, measure="score", points=tuple(points), front=("fast", "good", "dense", "same"))
    assert sentences(found) == (
        "Beaten by none in both time and quality: fast, good, dense, same. Worse than dense: fast. "
        "Not told apart from dense by these prompts: good, slow, same."
    )


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (("--seeds", "0"), "--seeds must be at least 1, got 0"),
        (("--minutes", "0"), "--minutes must be above 0, got 0"),
        (("--task", "riddle"), "unknown task 'riddle'"),
    ],
)
def test_bad_use(searched: Path, tmp_path: Path, more: tuple[str, ...], line: str) -> None:
    with pytest.raises(HeadwiseError, match=line):
        report.main(asked(searched, tmp_path / "out", *more))
    assert not list(tmp_path.iterdir())


def test_an_artifact_needs_a_model_and_a_folder_neither(searched: Path, tmp_path: Path) -> None:
    with pytest.raises(HeadwiseError, match="a report of an artifact needs --model MODEL and --out FOLDER"):
        report.main([str(searched / "cfg.yaml")])
    with pytest.raises(HeadwiseError, match=r"needs an artifact, such as cfg\.yaml, got"):
        report.main([str(tmp_path), "--model", "smollm2"])
    with pytest.raises(HeadwiseError, match="cannot be read: no such file or directory; give a folder that"):
        report.main([str(tmp_path)])
    (tmp_path / "evaluation.json").write_text("{}")
    with pytest.raises(HeadwiseError, match="is of no evaluation by this version"):
        report.main([str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["evaluation.json"]
