"""The registry of tables, the result files that they read, and Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from result import RESULTS, Result, read

Table = Callable[["Results"], str]
TABLES: dict[str, Table] = {}
"""Every table, by the name that a page's marker has."""


def table(name: str) -> Callable[[Table], Table]:
    """Register a table under the name that a page's marker has."""

    def register(build: Table) -> Table:
        if name in TABLES:
            raise ValueError(f"two tables are named {name}")
        TABLES[name] = build
        return build

    return register


class Results:
    """The result files of a folder, each read once."""

    def __init__(self, folder: Path = RESULTS) -> None:
        self._folder = folder
        self._files: dict[str, Result] = {}

    def __getitem__(self, name: str) -> Result:
        """Return the content of a file, by its name without .json."""
        if name not in self._files:
            self._files[name] = read(self._folder / f"{name}.json")
        return self._files[name]

    def settings(self, name: str) -> dict[str, Any]:
        """Return a file's row of settings."""
        return one(self[name].rows, part="settings")


def matching(rows: Iterable[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    """Return the rows in which all of the fields have these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in fields.items())]


def one(rows: Iterable[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """Return the only row in which all of the fields have these values.

    Raises:
        ValueError: there is none, or more than one.
    """
    found = matching(rows, **fields)
    if len(found) != 1:
        raise ValueError(f"one row must have {fields}, {len(found)} do")
    return found[0]


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table.

    Raises:
        ValueError: a row has another number of cells than the header.
    """
    lines = [_line(header), "|" + "---|" * len(header)]
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"{len(header)} cells are needed, got {row}")
        lines.append(_line(row))
    return "".join(f"{line}\n" for line in lines)


def _line(cells: Sequence[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def link(text: str, name: str) -> str:
    """Return a link from a page of docs/ to a result file."""
    return f"[{text}](results/{name}.json)"


def seconds(value: float) -> str:
    """Return three significant digits, at most two decimals."""
    if value < 10:
        return f"{value:.2f}"
    if value < 100:
        return f"{value:.1f}"
    return f"{value:,.0f}"


def times(value: float) -> str:
    """Return a factor."""
    return f"{value:.2f}x"


def span(low: float | None, high: float | None, spec: str) -> str:
    """Return an interval in brackets."""
    if low is None or high is None:
        return "(no interval)"
    return f"({low:{spec}} to {high:{spec}})"


def interval(row: dict[str, Any], spec: str) -> str:
    """Return the value of a row with its interval: value, low and high."""
    return f"{row['value']:{spec}} {span(row['low'], row['high'], spec)}"


def ratios(baseline: Sequence[float], values: Sequence[float]) -> str:
    """Return a speedup: the median of the rounds' ratios, and their range."""
    each = [a / b for a, b in zip(baseline, values, strict=True)]
    return f"{times(statistics.median(each))} ({min(each):.2f} to {max(each):.2f})"
