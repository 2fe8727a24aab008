"""Progress: a bar on a terminal, lines in a log, nothing with -q."""

from __future__ import annotations

import re
import sys

import pytest

from artifacts.cli import command
from profiling import progress
from profiling.progress import announce, bar, phase


def test_phase_in_a_log_prints_start_and_end(capsys):
    with phase("curves", 8, "prompts") as shown:
        shown.skip(2)
        shown.note("prose/4096")
        shown.update(6)
    first, last = capsys.readouterr().err.splitlines()
    assert first == "curves: 8 prompts"
    assert re.fullmatch(r"curves: 8 of 8 prompts in 00:0\d", last)


def test_long_phase_in_a_log_prints_a_line_a_minute_with_the_time_left(monkeypatch, capsys):
    clock = iter([0.0, 0.0, 30.0, 60.0, 61.0, 180.0, 200.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with phase("curves", 10, "prompts") as shown:
        shown.skip(4)
        # At 30, 60, 61 and 180 seconds: 4 of 6 prompts in 180 seconds.
        for _ in range(4):
            shown.update()
    assert capsys.readouterr().err.splitlines()[1:-1] == [
        "curves: 6 of 10 prompts, 02:00 left",
        "curves: 8 of 10 prompts, 01:30 left",
    ]


def test_phase_that_fails_prints_no_end(capsys):
    with pytest.raises(KeyError), phase("p", 3):
        raise KeyError
    assert capsys.readouterr().err == "p: 3 jobs\n"


def test_quiet_prints_nothing(monkeypatch, capsys):
    with phase("p", 2, quiet=True) as shown:
        shown.update()
    # headwise -q
    monkeypatch.setattr(command, "verbosity", -1)
    with phase("p", 2) as shown:
        shown.skip()
    announce("a line")
    assert bar([1]).disable and capsys.readouterr().err == ""


def test_phase_on_a_terminal_leaves_earlier_jobs_out_of_the_rate(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with phase("curves", 8, "prompts") as shown:
        shown.skip(4)
        shown.note("vt")
        assert (shown.n, shown.initial) == (4, 4)
        shown.update(4)
    bar = capsys.readouterr().err
    assert "curves" in bar and "8/8" in bar and "100%" in bar and "vt" in bar
