"""Progress of long commands on stderr: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from artifacts.cli import command

# Seconds from one line to the next where stderr is no terminal.
EVERY = 60.0


class Phase(tqdm):
    """A bar of tqdm that also counts the jobs that an earlier run has finished.

    Attributes:
        done: jobs of this run and of earlier ones, also where no bar is shown.
        prints: log lines take the place of the bar.
    """

    done = 0
    prints = False
    _name = ""
    _unit = ""
    _skipped = 0
    _start = 0.0
    _printed = 0.0

    def start(self, name: str, unit: str, *, prints: bool) -> None:
        """Begin to measure time; with `prints` a log line follows at most every EVERY seconds."""
        self._name = name
        self._unit = unit
        self.prints = prints
        self._start = self._printed = time.monotonic()

    def update(self, count: int = 1) -> None:
        """Count `count` more jobs as done."""
        self.done += count
        super().update(count)
        now = time.monotonic()
        if self.prints and self.done < self.total and now >= self._printed + EVERY:
            self._printed = now
            announce(self._line(now - self._start))

    def _line(self, seconds: float) -> str:
        """The jobs that are done, and the time left at the mean rate of this run."""
        left = seconds / max(self.done - self._skipped, 1) * (self.total - self.done)
        remaining = tqdm.format_interval(left)
        return f"{self._name}: {self.done} of {self.total} {self._unit}, {remaining} left"

    def skip(self, count: int = 1) -> None:
        """Count `count` jobs as done by an earlier run; they do not affect the rate."""
        self.done += count
        self._skipped += count
        if not self.disable:
            self.initial += count
            self.n += count
            self.refresh()

    def note(self, text: str) -> None:
        """Name the work in progress."""
        self.set_postfix_str(text)


@contextmanager
def phase(name: str, total: int, unit: str = "jobs", *, quiet: bool = False) -> Iterator[Phase]:
    """Show a phase while the block runs.

    Args:
        name: of the phase.
        total: number of its jobs.
        unit: the kind of job, in the plural.
        quiet: show nothing, as ranks after the first do, and every command with -q.
    """
    quiet = quiet or command.verbosity < 0
    terminal = sys.stderr.isatty()
    start = time.monotonic()
    if not quiet and not terminal:
        announce(f"{name}: {total} {unit}")
    with Phase(total=total, desc=name, unit=f" {unit}", disable=quiet or not terminal) as shown:
        shown.start(name, unit, prints=not quiet and not terminal)
        yield shown
    if not quiet and not terminal:
        seconds = tqdm.format_interval(time.monotonic() - start)
        announce(f"{name}: {shown.done} of {total} {unit} in {seconds}")


def bar(*iterables: Any, **options: Any) -> tqdm[Any]:
    """Show tqdm for short work or work inside a phase: on a terminal only, and not with -q."""
    disable = True if command.verbosity < 0 else None
    return tqdm(*iterables, leave=False, disable=disable, **options)


def announce(line: str) -> None:
    """Print a line on stderr, between two phases; nothing with -q."""
    if command.verbosity >= 0:
        print(line, file=sys.stderr, flush=True)
