"""Evaluations within minutes: measured as far as the time goes, the rest named, resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from artifacts import load
from profiling.evaluate import main
from profiling.evaluation import rounds
from profiling.evaluation.measure import evaluate
from profiling.prompts.settings import Setting

LENGTH = 900


def evaluated(searched: Path, out: Path, minutes: float) -> dict[str, Any]:
    asked = (
        f"{searched}/cfg.yaml --model {searched}/tiny --out {out} --dtype float32 --seeds 2 "
        f"--length {LENGTH} --methods headwise a_shape random_tiles --minutes {minutes} "
        "--task passkey --task babilong_qa1"
    )
    assert main(asked.split()) == 0
    record: dict[str, Any] = json.loads((out / "evaluation.json").read_text())
    return record


def test_what_fits_is_measured_and_the_rest_is_named(
    searched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, int, tuple[str, ...]]] = []

    def counted(config: Any, *given: Any) -> Any:
        ran.append((config.tasks[0], config.samples, config.methods))
        return evaluate(config, *given)

    monkeypatch.setattr(rounds, "evaluate", counted)
    monkeypatch.setattr(rounds, "least_units", lambda comparisons: 3)
    monkeypatch.setattr(rounds, "FURTHER", ("random_tiles",))
    monkeypatch.setattr(rounds, "ROUNDS", (1, 2))
    first, further = ("dense", "headwise", "a_shape"), ("random_tiles",)
    # The first task is always run; after it the time is up.
    record = evaluated(searched, tmp_path, 0.0001)
    # Three prompts of two seeds: as many of each.
    assert ran == [("passkey", 2, first)]
    assert record["left_out"]["what"] == [
        "babilong_qa1 at 900 tokens, 4 prompts",
        "passkey at 900 tokens, 4 prompts under random_tiles",
        "babilong_qa1 at 900 tokens, 4 prompts under random_tiles",
        "passkey at 900 tokens, 8 prompts",
        "babilong_qa1 at 900 tokens, 8 prompts",
        "passkey at 900 tokens, 8 prompts under random_tiles",
        "babilong_qa1 at 900 tokens, 8 prompts under random_tiles",
    ]
    ran.clear()
    record = evaluated(searched, tmp_path, 30)
    assert ran == [
        (task, samples, methods)
        for samples in (2, 4)
        for methods in (first, further)
        for task in ("passkey", "babilong_qa1")
    ]
    assert record["left_out"]["what"] == []
    assert record["settings"]["tasks"] == ["passkey", "babilong_qa1"]
    assert record["settings"]["samples"] == 4
    own = [each for each in record["figures"] if each["method"] == "random_tiles"]
    counts = {(each["task"], each["measure"]): each["count"] for each in own}
    assert counts["passkey", "score"] == counts["babilong_qa1", "forced choice"] == 8
    assert all(len(each["by_seed"]) == 2 for each in own)
    # What chooses by scores is not timed.
    timed = {each["method"] for each in record["prefill"]}
    assert timed == {"dense", "dense_kernel", "headwise", "a_shape"}


def test_tasks_and_lengths_are_the_models_settings(
    searched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = load(searched / "cfg.yaml")
    base = Setting(task="a", length=LENGTH, measure="score", count=9, dense=0.5, low=0.1, high=0.9)
    some = (
        base,
        replace(base, task="short", length=20),
        replace(base, task="hopeless", dense=0.0),
        replace(
            base, task="forced", dense=0.95, low=0.6, measure="choice", chance=0.5, difference=-0.1
        ),
        replace(
            base, task="guessed", dense=0.5, low=0.2, measure="choice", chance=0.25, difference=-0.1
        ),
        replace(base, task="given up", dense=0.95, low=0.6, measure="choice", chance=0.25),
    )
    monkeypatch.setattr(rounds, "settings", {"m": some, "smollm2": some[:1]}.__getitem__)
    places, left = rounds.places_of("m", artifact, (), ())
    assert places == [("prose", LENGTH), ("a", LENGTH), ("forced", LENGTH)]
    assert left == ["short at 20 tokens, which the artifact serves densely"]
    assert rounds.places_of("m", artifact, (), (600,))[0] == [
        (t, 600) for t in ("prose", "a", "short", "forced")
    ]
    monkeypatch.setattr(rounds, "settings", {"new": (), "smollm2": some[:1]}.__getitem__)
    assert rounds.places_of("new", artifact, (), (600,))[0] == [("prose", 600), ("a", 600)]
