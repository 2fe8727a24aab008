"""Settings: which of a task's rows is kept, what tells most comes first, and what ships is what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from artifacts import HeadwiseError
from profiling.models.packages import PACKAGES
from profiling.prompts.prompt import parse_name, parse_task
from profiling.prompts.settings import Setting, keep, settings, settled

ROW = Setting(
    task="vt", length=1024, measure="score", count=12, dense=0.5, low=0.2, high=0.8, seconds=2.0, telling=30, prompts=90
)


def changed(**fields: Any) -> Setting:
    return replace(ROW, **fields)


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        ([changed(dense=0.95), changed(task="vt@hops=1")], 1),
        ([changed(measure="choice"), changed(telling=900)], 1),
        ([changed(dense=0.1), changed(measure="choice", dense=0.95)], 1),
        ([changed(measure="choice", dense=0.95), changed(measure="choice", telling=None)], 1),
        ([changed(telling=None), changed(task="vt@hops=1")], 1),
        ([changed(), changed(length=2048, seconds=9.0)], 1),
    ],
)
def test_the_best_setting_of_a_task(rows: list[Setting], best: int) -> None:
    assert settled(rows) == settled(rows[::-1]) == [rows[best]]


def test_what_guessing_gives_shows_nothing() -> None:
    # MRCR with two needles on SmolLM2: a forced choice of two.
    coin = changed(task="mrcr", measure="choice", dense=0.42, low=0.19, high=0.68, chance=0.5)
    assert not coin.shows and not coin.asked
    assert changed(measure="choice", dense=0.42, low=0.19, chance=1 / 8).shows
    # A score counts, too: answers inside a prompt out of two labels.
    assert not changed(dense=0.55, low=0.45, chance=0.5).shows and changed(dense=0.55, low=0.51, chance=0.5).shows
    sure = changed(measure="choice", dense=0.95, low=0.7, chance=0.5, difference=-0.2)
    assert sure.asked and not sure.shows and not replace(sure, measure="score").asked
    assert not replace(sure, difference=None).asked, "given up"


def test_a_file_keeps_the_best_of_each_model_the_most_telling_first(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    keep(file, "one", [ROW, changed(task="mrcr", telling=7)])
    keep(file, "two", [ROW])
    keep(file, "one", [changed(task="vt@hops=2", telling=3), changed(task="mrcr", dense=0.0)])
    told = {model: [row["task"] for row in rows] for model, rows in json.loads(file.read_text()).items()}
    assert told == {"one": ["vt@hops=2", "mrcr"], "two": ["vt"]}
    file.write_text('{"one": [{"task": "vt"}]}')
    with pytest.raises(HeadwiseError, match=r"settings\.json holds no settings"):
        keep(file, "one", [ROW])


@pytest.mark.parametrize("model", PACKAGES)
def test_what_ships_is_of_tasks_that_there_are(model: str) -> None:
    some = settings(model)
    assert some and sum(each.shows for each in some) > 2
    kinds = [parse_name(each.task) for each in some]
    assert len(kinds) == len(set(kinds)) and list(some) == settled(some)
    assert all(parse_task(each.task).name == each.task and each.low <= each.dense <= each.high for each in some)
    assert not settings("none")
