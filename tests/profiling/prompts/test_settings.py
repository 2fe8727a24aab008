"""Settings: which ones are asked, and what ships is of tasks that there are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from profiling.models.packages import PACKAGES
from profiling.prompts.prompt import parse_name, parse_task
from profiling.prompts.settings import Setting, settings

ROW = Setting(task="vt", length=1024, measure="score", count=12, dense=0.5, low=0.2, high=0.8)


def test_what_guessing_gives_shows_nothing() -> None:
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
def test_what_ships_is_of_tasks_that_there_are(model: str) -> None:
    some = settings(model)
    assert some and sum(each.shows for each in some) > 2
    kinds = [parse_name(each.task) for each in some]
    assert len(kinds) == len(set(kinds))
    for each in some:
        assert parse_task(each.task).name == each.task and each.low <= each.dense <= each.high
    assert not settings("none")
