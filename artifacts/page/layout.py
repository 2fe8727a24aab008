"""Layout of a page on a terminal: labeled lines, tables, numbers."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from artifacts.errors import one_line

_LABEL = 13


def labelled(label: str, text: str, width: int, indent: int = _LABEL) -> Iterator[str]:
    """Yield a label and its wrapped text, with control characters escaped."""
    lines = textwrap.wrap(one_line(text), width - indent, break_on_hyphens=False) or [""]
    for i, line in enumerate(lines):
        if i == 0:
            first = label
        else:
            first = ""
        yield f"{first:{indent}}{line}"


def cell(value: float | None, form: str = "", unit: str = "") -> str:
    """Format a number, or - for None."""
    if value is None:
        return "-"
    return f"{value:{form}}{unit}"


def aligned(
    rows: Sequence[Sequence[str]], left: Sequence[int] = (0,), indent: int = 0
) -> list[str]:
    """Align rows of cells in columns; columns in `left` are left-aligned, others right."""
    cells = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        columns = enumerate(zip(row, widths, strict=True))
        padded = [f"{cell:<{w}}" if i in left else f"{cell:>{w}}" for i, (cell, w) in columns]
        lines.append((" " * indent + "  ".join(padded)).rstrip())
    return lines
