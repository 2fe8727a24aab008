"""Difficulty: what is measured is what trials say, of whole contexts, and a run goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from artifacts import HeadwiseError
from profiling import difficulty
from profiling.models.loading import load_model
from profiling.prompts.prompt import make_prompts
from profiling.quality.trials import trial
from tests.profiling.quality.test_trials import DENSE
from tests.search.conftest import save_tiny

LENGTH = 900


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("difficulty") / "tiny")


def asked(model: Path, out: Path, *more: str) -> list[str]:
    return ["--model", str(model), "--out", str(out), "--length", str(LENGTH), "--dtype", "float32", *more]


def test_rows_are_means_of_trials_and_are_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = ("--task", "line_turns@questions=2", "--task", "mrcr", "--samples", "3")
    out = tmp_path / "found.json"
    assert difficulty.main(asked(model, out, *tasks)) == 0
    rows = {(row["task"], row["measure"]): row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == [("line_turns@questions=2", "score"), ("mrcr", "score"), ("mrcr", "choice")]
    loaded = load_model(str(model), dtype="float32")
    prompts = make_prompts("mrcr", loaded.tokenizer, length=LENGTH, samples=3, seed=3000)
    dense = [trial(loaded.model, loaded.tokenizer, prompt, DENSE) for prompt in prompts]
    assert rows["mrcr", "choice"]["dense"] == pytest.approx(sum(each["choice"] for each in dense) / 3)
    assert all(
        row["count"] == 3 and row["prompts"] >= 6 and row["low"] <= row["dense"] <= row["high"] for row in rows.values()
    )
    assert all(row["shows"] == (0.4 <= row["dense"] <= 0.9 and row["low"] > row["chance"]) for row in rows.values())
    assert rows["mrcr", "choice"]["chance"] == 0.5 < rows["mrcr", "score"]["chance"] < 1
    assert rows["line_turns@questions=2", "score"]["chance"] == 0
    assert "prompts for 5 points" in capsys.readouterr().out

    def never(*given: Any) -> Any:
        raise AssertionError("what is in the ledger is not run again")

    monkeypatch.setattr(difficulty, "trials", never)
    kept = tmp_path / "settings.json"
    assert difficulty.main(asked(model, out, *tasks, "--settings", str(kept))) == 0
    assert {(row["task"], row["measure"]): row for row in json.loads(out.read_text())["rows"]} == rows
    assert {row["task"] for row in json.loads(kept.read_text())["tiny"]} == {"line_turns@questions=2", "mrcr"}


def test_a_task_that_is_far_off_is_given_up(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    assert difficulty.main(asked(model, out, "--task", "passkey", "--samples", "20")) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["count"], row["dense"], row["difference"], row["prompts"]) == (8, 0.0, None, None)
    assert row["high"] < 0.4 and not row["shows"] and "given up" in capsys.readouterr().out


def test_a_task_that_is_guessed_is_given_up() -> None:
    halves = [{"score": 0.0, "choice": float(at % 2)} for at in range(40)]
    assert difficulty._given_up(halves, {"score": 0.0, "choice": 0.9})
    assert not difficulty._given_up(halves, {"score": 0.0, "choice": 0.5})


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ((), "say what to measure: --task TASK, one or more"),
        (("--task", "riddle"), "unknown task 'riddle'"),
        (("--task", "mrcr", "--samples", "1"), "--samples must be at least 2, got 1"),
    ],
)
def test_bad_use(model: Path, tmp_path: Path, more: tuple[str, ...], line: str) -> None:
    with pytest.raises(HeadwiseError, match=line):
        difficulty.main(asked(model, tmp_path / "x.json", *more))
    assert not list(tmp_path.iterdir())
