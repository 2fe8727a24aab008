"""Progress: a bar on a terminal, lines in a log, nothing where quiet is asked for."""

from __future__ import annotations

import re
import sys
import time

import pytest
from tqdm import tqdm

from artifacts.cli import command
from profiling import progress
from profiling.progress import announce, bar, phase


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
    # Two units are too few for an estimate.
    assert lines[2] == "curves: 4 of 8 prompts (prose/4096)"
    assert re.fullmatch(r"curves: 8 of 8 prompts in 00:0\d", lines[-1])


@pytest.fixture
def clock(monkeypatch):
    """The seconds that progress reads: clock[0] += 5 passes five."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_time_left_after_slow_first_unit_is_the_pace_of_the_others(clock):
    """The first unit compiles kernels for four minutes, the others take two seconds each."""
    with phase("p", 172, quiet=True) as shown:
        shown.skip(100)
        lines = []
        for seconds in [240] + [2] * 71:
            clock[0] += seconds
            shown.update()
            lines.append(shown.line())
    assert [line for line in lines[:7] if "left" in line] == []
    assert lines[7] == "p: 108 of 172 units, 02:08 left"
    assert lines[-1] == "p: 172 of 172 units, 00:00 left"
    for done, line in enumerate(lines[7:], start=8):
        assert line.endswith(f", {tqdm.format_interval(2 * (72 - done))} left")


def test_time_left_within_a_unit_counts_down(clock):
    with phase("p", 4, quiet=True) as shown:
        for _ in range(3):
            clock[0] += 10
            shown.update()
        clock[0] += 4
        assert shown.line() == "p: 3 of 4 units, 00:06 left"
        clock[0] += 20
        assert shown.line() == "p: 3 of 4 units, 00:00 left"


def test_time_left_after_units_done_at_once_is_unknown(clock):
    with phase("p", 100, quiet=True) as shown:
        clock[0] += 10
        shown.update(50)
        assert shown.line() == "p: 50 of 100 units"


def test_quiet_says_nothing_and_an_error_passes(monkeypatch, capsys):
    with pytest.raises(KeyError), phase("p", 3):
        raise KeyError
    assert capsys.readouterr().err == "p: 3 units\n"
    # headwise -q
    monkeypatch.setattr(command, "verbosity", -1)
    with phase("p", 2) as shown:
        shown.update()
    announce("a line")
    assert bar([1]).disable and capsys.readouterr().err == ""


def test_a_terminal_shows_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with phase("curves", 8, "prompts") as shown:
        shown.skip(4)
        shown.note("vt")
        shown.update(4)
    bar = capsys.readouterr().err
    assert "curves" in bar and "8/8" in bar and "100%" in bar and "4 of 8" not in bar
