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

# Without a terminal: how often a line says how far the phase is.
EVERY_SECONDS = 60.0


class Phase:
    """One phase as it goes on. Counts are of its units."""

    def __init__(self, name: str, total: int, unit: str, bar: tqdm[Any] | None) -> None:
        """bar: where there is a terminal."""
        self.name = name
        self.total = total
        self.unit = unit
        self.done = 0
        self._bar = bar
        self._before = 0
        self._note = ""
        self._began = time.monotonic()
        self._reached = False

    def update(self, count: int = 1) -> None:
        """Count so many more as done."""
        self.done += count
        if self._bar is not None:
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
            self._bar.set_postfix_str(text, refresh=False)

    def line(self) -> str:
        """Say how far the phase is, and the time left at its pace so far."""
        now = self.done - self._before
        seconds = time.monotonic() - self._began
        line = f"{self.name}: {self.done} of {self.total} {self.unit}"
        if now:
            line += f", {tqdm.format_interval(seconds / now * (self.total - self.done))} left"
        if self._note:
            line += f" ({self._note})"
        return line

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
        name: what the phase is called. total: how many units it has. unit: what they are, in the
        plural. quiet: show nothing, as ranks after the first do, and every command with -q. every:
        without a terminal, seconds from one line to the next, between those of its start and its
        end.
    """
    if quiet or command.verbosity < 0:
        yield Phase(name, total, unit, None)
    elif sys.stderr.isatty():
        with tqdm(
            total=total, desc=name, unit=f" {unit}", unit_scale=total > 9999, smoothing=0.05
        ) as bar:
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


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
