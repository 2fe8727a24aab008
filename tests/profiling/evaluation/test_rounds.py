"""Settings of models, and evaluations within minutes: the rest is named and resumed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from artifacts import load
from profiling.evaluation import rounds
from profiling.evaluation.measure import evaluate
from profiling.models.packages import PACKAGES
from profiling.prompts.prompt import parse_name, parse_task
from profiling.prompts.settings import Setting, settings
from tests.profiling.conftest import LENGTH

ROW = Setting(task="vt", length=1024, measure="score", count=12, dense=0.5, low=0.2, high=0.8)


def test_what_guessing_gives_shows_nothing():
    # A forced choice of two.
    coin = replace(ROW, measure="choice", dense=0.42, low=0.19, high=0.68, chance=0.5)
    assert not coin.shows and not coin.asked
    assert replace(coin, chance=1 / 8).shows
    # A score counts, too: answers inside a prompt out of two labels.
    assert not replace(ROW, dense=0.55, low=0.45, chance=0.5).shows
    assert replace(ROW, dense=0.55, low=0.51, chance=0.5).shows
    sure = replace(coin, dense=0.95, low=0.7, difference=-0.2)
    assert sure.asked and not sure.shows and not replace(sure, measure="score").asked
    assert not replace(sure, difference=None).asked, "given up"


@pytest.mark.parametrize("model", PACKAGES)
def test_what_ships_is_of_tasks_that_there_are(model):
    some = settings(model)
    assert some and sum(each.shows for each in some) > 2
    kinds = [parse_name(each.task) for each in some]
    assert len(kinds) == len(set(kinds))
    for each in some:
        assert parse_task(each.task).name == each.task and each.low <= each.dense <= each.high
    assert not settings("none")


@pytest.mark.usefixtures("invented")
def test_what_fits_is_measured_and_the_rest_is_named(command, monkeypatch):
    asked = "--seeds 2 --methods headwise a_shape random_tiles --task passkey --task babilong_qa1"
    ran = []

    def counted(config, *given):
        ran.append((config.tasks[0], config.samples, config.methods))
        return evaluate(config, *given)

    monkeypatch.setattr(rounds, "evaluate", counted)
    monkeypatch.setattr(rounds, "least_units", lambda comparisons: 3)
    monkeypatch.setattr(rounds, "FURTHER", ("random_tiles",))
    monkeypatch.setattr(rounds, "ROUNDS", (1, 2))
    first, further = ("dense", "headwise", "a_shape"), ("random_tiles",)
    # The first task is always run; after it the time is up.
    record = command(f"{asked} --minutes 0.0001")
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
    record = command(f"{asked} --minutes 30")
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


def test_tasks_and_lengths_are_the_models_settings(searched, monkeypatch):
    artifact = load(searched / "cfg.yaml")
    name = artifact.model.name
    base = Setting(task="a", length=LENGTH, measure="score", count=9, dense=0.5, low=0.1, high=0.9)
    sure = replace(base, dense=0.95, low=0.6, measure="choice", chance=0.5, difference=-0.1)
    some = (
        base,
        replace(base, task="short", length=20),
        replace(base, task="hopeless", dense=0.0),
        replace(sure, task="forced"),
        replace(sure, task="guessed", dense=0.5, low=0.2, chance=0.25),
        replace(sure, task="given up", difference=None),
    )
    monkeypatch.setattr(rounds, "settings", {name: some, "smollm2": some[:1]}.__getitem__)
    places, left = rounds.places_of(artifact, (), ())
    assert places == [("prose", LENGTH), ("a", LENGTH), ("forced", LENGTH)]
    assert left == ["short at 20 tokens, which the artifact serves densely"]
    longer, _ = rounds.places_of(artifact, (), (600,))
    assert longer == [(task, 600) for task in ("prose", "a", "short", "forced")]
    monkeypatch.setattr(rounds, "settings", {name: (), "smollm2": some[:1]}.__getitem__)
    assert rounds.places_of(artifact, (), (600,))[0] == [("prose", 600), ("a", 600)]
