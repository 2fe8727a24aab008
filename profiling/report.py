"""python -m profiling.report: the page and the table of an evaluation again, from what it measured.

Reads evaluation.json in a folder that python -m profiling.evaluate wrote, draws index.html anew and prints the table.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from artifacts import HeadwiseError, arguments
from artifacts.command_line import ArgumentParser, run_command
from artifacts.errors import one_line, reason, shorten
from artifacts.files import atomic_write, open_regular
from profiling.evaluation.measure import OUTPUT
from profiling.evaluation.page import page
from profiling.evaluation.record import table


def run(folder: Path) -> dict[str, Any]:
    """Draw the page again; what evaluation.json holds.

    Raises:
        HeadwiseError: there is no such file, it is of no evaluation, or the page cannot be written.
    """
    file = folder / OUTPUT
    try:
        with open_regular(file) as opened:
            record = json.load(opened)
        drawn = page(record)
        table(record)
    except OSError as error:
        raise HeadwiseError(
            f"{shorten(str(file))} cannot be read: {reason(error)}; give a folder that profiling.evaluate wrote"
        ) from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        what = one_line(f"{type(error).__name__}: {error}")[:100]
        raise HeadwiseError(f"{shorten(str(file))} is of no evaluation by this version ({what})") from None
    atomic_write(folder / "index.html", drawn.encode())
    return dict(record)


def parser() -> ArgumentParser:
    """The command line of python -m profiling.report."""
    p = ArgumentParser(prog="python -m profiling.report", description=__doc__)
    p.add_argument("folder", metavar="FOLDER", type=Path, help=f"of an evaluation, with its {OUTPUT}")
    arguments.add_json(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = parser().parse_args(argv)
    record = run(options.folder)
    arguments.deliver(f"{table(record)}\n\nwrote {options.folder / 'index.html'}", record, options.json)
    return 0


if __name__ == "__main__":
    run_command(main)
