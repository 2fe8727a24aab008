"""A small command to launch by torchrun: jobs of a resume file, reported by the first rank.

Every unit that begins is a line "unit NUMBER RANK PID" of the log.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np

from artifacts import HeadwiseError
from artifacts.cli.command import run_command
from artifacts.files import atomic_write
from profiling import ranks as launched
from profiling.ledger import Ledger, Unit
from profiling.models.identity import Identity
from profiling.progress import phase
from profiling.ranks import ranks
from profiling.shared_jobs import run_jobs

UNITS = 7
MODEL = Identity(name="tiny", key="0" * 64)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--hang", help="the unit at which to wait for a kill")
    parser.add_argument("--fail", help="the unit that cannot be")
    parser.add_argument("--bug", help="the unit that divides by zero")
    parser.add_argument("--all-fail", action="store_true", help="every rank finds the same wrong")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--grace", type=float, help="seconds in which torchrun ends the others")
    options = parser.parse_args(argv)
    if options.grace:
        launched._GRACE = options.grace

    def work(unit: Unit) -> object:
        with options.out.with_suffix(".log").open("a") as log:
            log.write(f"{unit.name} {os.environ.get('RANK', '-')} {os.getpid()}\n")
        while options.hang == unit.name:
            time.sleep(0.05)
        if options.fail == unit.name:
            raise HeadwiseError(f"{unit.name} cannot be")
        if options.bug == unit.name:
            return 1 / 0
        number = int(unit.name.split()[1])
        return {
            "sums": np.random.default_rng(number).normal(size=5),
            "mean": 1 / (3 + number),
            "odd": (number % 2, None),
        }

    with ranks(timeout=options.timeout) as joined:
        if options.all_fail:
            raise HeadwiseError("this cannot be for anybody")
        with Ledger(options.out, "work", MODEL, settings={}, ranks=joined) as ledger:
            units = [ledger.unit(f"unit {number}") for number in range(UNITS)]
            with phase("work", UNITS, quiet=not joined.is_first) as shown:
                values = run_jobs(
                    ledger, joined, units, work, group=lambda unit: unit.name, shown=shown
                )
            assert joined.broadcast(joined.rank) == 0
            own = f"rank {joined.rank}"
            each = joined.gather({own: np.arange(joined.rank), "same": joined.rank})
            assert list(each) == sorted([*(f"rank {n}" for n in range(joined.count)), "same"])
            assert each["same"] == 0
            with joined.main_process_first():
                assert options.out.with_suffix(".first").exists() or joined.is_first
                options.out.with_suffix(".first").touch()
            if joined.is_first:
                report = [{**value, "sums": value["sums"].tobytes().hex()} for value in values]
                atomic_write(options.out, json.dumps(report).encode())
                print(f"wrote {options.out}")
            ledger.remove()
    return 0


if __name__ == "__main__":
    run_command(main)
