"""A small search for the tests to start, kill and start again: units, then trials, on a shared storage.

Every unit and trial that begins and ends is a line "WHAT KEY PID" of the log.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from artifacts.command_line import run_command
from search.storage import open_storage
from search.study import open_study
from search.trials import run_trials
from search.units import Units
from search.workers import is_worker, workers

UNITS = [f"unit {number}" for number in range(8)]
TRIALS = 10
BASELINES = [{"x": 0.5, "y": 5}, {"x": 0.1, "y": 1}]


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--storage")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.0, help="that a unit or trial takes")
    parser.add_argument("--hang", help="the unit or trial at which to wait for a kill")
    parser.add_argument("--together", type=int, default=1, help="begin when so many processes are there")
    options = parser.parse_args(argv)
    log = options.out.with_suffix(".log")

    def note(what: str, key: object) -> None:
        with log.open("a") as file:
            file.write(f"{what} {key} {os.getpid()}\n")

    def work(kind: str, key: str) -> None:
        note(f"begin {kind}", key)
        while options.hang == key:
            time.sleep(0.1)
        time.sleep(options.seconds)

    note("ready", "-")
    while log.read_text().count("ready") < options.together:
        time.sleep(0.02)
    storage = open_storage(options.storage, options.out)
    units = Units(storage, "units", UNITS, {"version": 1})
    study = open_study(storage, "study", {"version": 1}, directions=("minimize", "minimize"))

    def objective(trial: object) -> tuple[float, float]:
        x, y = trial.suggest_float("x", 0, 1), trial.suggest_int("y", 0, 10)  # type: ignore[attr-defined]
        work("trial", f"trial {trial.user_attrs['key']}")  # type: ignore[attr-defined]
        return (x - 0.3) ** 2, x + y

    with workers(options.workers, "tests.search.shared_work", argv):
        for key in units.claim():
            work("unit", key)
            units.put(key, {"name": key, "array": np.arange(3.0)})
            note("end unit", key)
        trials = run_trials(study, objective, n_trials=TRIALS, seed=3, baselines=BASELINES)
    if not is_worker():
        found = [(trial.params["x"], trial.params["y"], *trial.values) for trial in trials]
        options.out.write_text(repr((sorted(units.results()), found)))
        note("wrote", options.out.name)
    return 0


if __name__ == "__main__":
    # A job in the background ignores Ctrl-C, and so do all that it starts, these tests among them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_command(main)
