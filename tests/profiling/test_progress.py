"""Progress: a bar on a terminal, lines in a log, nothing where quiet is asked for."""

from __future__ import annotations

import re
import sys
import time

import pytest

from artifacts.cli import command
from profiling.progress import bar, phase


def test_a_log_shows_start_life_and_end(capsys):
    with phase("curves", 8, "prompts", every=0.3) as shown:
        shown.reach(2)
        time.sleep(0.4)  # no unit is done, and still there is a line
        shown.reach(4)
        shown.note("prose/4096")
        time.sleep(0.3)
        shown.update(4)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["curves: 8 prompts", "curves: 2 of 8 prompts"]
    # Two units in 0.6 seconds; the two of before are not counted.
    assert re.fullmatch(r"curves: 4 of 8 prompts, 00:01 left \(prose/4096\)", lines[2])
    assert re.fullmatch(r"curves: 8 of 8 prompts in 00:0\d", lines[-1])


def test_time_left_is_by_the_pace_of_this_run():
    with phase("p", 1000, quiet=True) as shown:
        shown.skip(900)
        assert "left" not in shown.line()
        shown._began -= 50
        shown.update(10)
        assert shown.line() == "p: 910 of 1000 units, 07:30 left"


def test_quiet_says_nothing_and_an_error_passes(monkeypatch, capsys):
    with pytest.raises(KeyError), phase("p", 3):
        raise KeyError
    assert capsys.readouterr().err == "p: 3 units\n"
    # headwise -q
    monkeypatch.setattr(command, "verbosity", -1)
    with phase("p", 2) as shown:
        shown.update()
    assert bar([1]).disable and capsys.readouterr().err == ""


def test_a_terminal_shows_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with phase("curves", 8, "prompts") as shown:
        shown.skip(4)
        shown.note("vt")
        shown.update(4)
    bar = capsys.readouterr().err
    assert "curves" in bar and "8/8" in bar and "100%" in bar and "4 of 8" not in bar
