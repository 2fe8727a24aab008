"""Progress of long commands on stderr: a bar on a terminal, else lines in a log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from artifacts.cli import command

# Without a terminal: how often a line reports how far the phase is.
EVERY_SECONDS = 60.0
# Units of this run, and the fraction of what it has to do, after which the time left is shown.
_UNITS = 3
_SHARE = 0.1
# tqdm's own format without its estimate.
_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


class Phase:
    """One phase as it goes on. Counts are of its units."""

    def __init__(self, name: str, total: int, unit: str, bar: tqdm[Any] | None) -> None:
        """Start a phase.

        Args:
            name: what the phase is called.
            total: how many units it has.
            unit: what they are, in the plural.
            bar: where there is a terminal.
        """
        self.name = name
        self.total = total
        self.unit = unit
        self.done = 0
        self._bar = bar
        self._before = 0
        self._note = ""
        self._began = time.monotonic()
        # (time, units done) after the first unit of this run, and after the last one.
        self._first: tuple[float, int] | None = None
        self._last = (self._began, 0)
        self._reached = False

    def update(self, count: int = 1) -> None:
        """Count so many more as done."""
        if not count:
            return
        self.done += count
        self._last = (time.monotonic(), self.done)
        self._first = self._first or self._last
        if self._bar is not None:
            self._bar.set_postfix_str(self._postfix(), refresh=False)
            self._bar.update(count)

    def skip(self, count: int = 1) -> None:
        """Count so many as done by an earlier run; they say nothing about this one's speed."""
        self.done += count
        self._before += count
        if self._bar is not None:
            self._bar.initial += count
            self._bar.n += count
            self._bar.refresh()

    def reach(self, done: int) -> None:
        """Set the number done; the first call tells what an earlier run has done."""
        if self._reached:
            move = self.update
        else:
            move = self.skip
        move(done - self.done)
        self._reached = True

    def note(self, text: str) -> None:
        """Name the work in hand."""
        self._note = text
        if self._bar is not None:
            self._bar.set_postfix_str(self._postfix(), refresh=False)

    def seconds_left(self) -> float | None:
        """Estimate the time left, None while too little is done for a stable estimate.

        It is the pace from the first unit of this run on: that one also compiles kernels and loads
        what the others find loaded."""
        units = self.done - self._before
        if self._first is None or units < max(_UNITS, _SHARE * (self.total - self._before)):
            return None
        began, before = self._first
        last, done = self._last
        if done == before:
            return None
        left = (last - began) / (done - before) * (self.total - done)
        return max(0.0, left - (time.monotonic() - last))

    def line(self) -> str:
        """Describe how far the phase is, with the time left once that is stable."""
        line = f"{self.name}: {self.done} of {self.total} {self.unit}"
        left = self.seconds_left()
        if left is not None:
            line += f", {tqdm.format_interval(left)} left"
        if self._note:
            line += f" ({self._note})"
        return line

    def _postfix(self) -> str:
        """The time left and the work in hand, for the bar."""
        left = self.seconds_left()
        parts = [self._note]
        if left is not None:
            parts.insert(0, f"{tqdm.format_interval(left)} left")
        return ", ".join(filter(None, parts))

    def end(self) -> str:
        """The line of a phase that is over."""
        seconds = time.monotonic() - self._began
        return (
            f"{self.name}: {self.done} of {self.total} {self.unit} in "
            f"{tqdm.format_interval(seconds)}"
        )


@contextmanager
def phase(
    name: str, total: int, unit: str = "units", *, quiet: bool = False, every: float = EVERY_SECONDS
) -> Iterator[Phase]:
    """Show a phase while the block runs.

    Args:
        name: what the phase is called.
        total: how many units it has.
        unit: what they are, in the plural.
        quiet: show nothing, as ranks after the first do, and every command with -q.
        every: without a terminal, seconds from one line to the next, between those of its start
            and its end.
    """
    if quiet or command.verbosity < 0:
        yield Phase(name, total, unit, None)
    elif sys.stderr.isatty():
        with tqdm(total=total, desc=name, unit_scale=total > 9999, bar_format=_FORMAT) as bar:
            yield Phase(name, total, unit, bar)
    else:
        shown = Phase(name, total, unit, None)
        over = threading.Event()

        def lines() -> None:
            # A thread: one unit may take longer than a reader of the log waits for a sign of life.
            while not over.wait(every):
                _print(shown.line())

        _print(f"{name}: {total} {unit}")
        thread = threading.Thread(target=lines, name="progress", daemon=True)
        thread.start()
        try:
            yield shown
        finally:
            over.set()
            thread.join()
        _print(shown.end())


def bar(*of: Any, leave: bool = False, **options: Any) -> tqdm[Any]:
    """tqdm of what is short or inside of a phase: on a terminal only, and not with -q."""
    if command.verbosity < 0:
        disable = True
    else:
        disable = None
    return tqdm(*of, leave=leave, disable=disable, **options)


def announce(line: str) -> None:
    """Print a line on stderr, between two phases; nothing with -q."""
    if command.verbosity >= 0:
        _print(line)


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
