"""The errors that a user can put right."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

# A field's own text may be in a line.
_LONGEST_LINE = 800


class HeadwiseError(ValueError):
    """A user's mistake. str() is one clear line: what is wrong, the value, and what would be right.

    Commands print it as `error: <line>` and exit with `status` (see artifacts.cli.command);
    anything else that escapes is a bug."""

    status = 2


class Finding(HeadwiseError):
    """Result that fails without a mistake, such as no artifact that passes its gate."""

    status = 3


class ArtifactError(HeadwiseError):
    """An artifact that cannot be read, trusted or written."""


def shorten(value: object, limit: int = 60) -> str:
    """The value as it goes into an error's line: its repr, on one line, at most `limit`
    characters."""
    # Slicing first keeps a 16 MiB string from being quoted whole only to be cut.
    if isinstance(value, str | bytes):
        value = value[: limit + 1]
    text = repr(value)
    if len(text) <= limit:
        return text
    return f"{text[: limit - 4]}...{text[-1]}"


def reason(error: OSError) -> str:
    """The system's own words for an OSError."""
    return (error.strerror or str(error)).lower()


def plural(count: int, noun: str) -> str:
    """1 head, 2 heads, 1,024 heads."""
    if count == 1:
        plural = ""
    else:
        plural = "s"
    return f"{count:,} {noun}" + plural


def number(value: float) -> str:
    """A measured number in four digits, large ones whole."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def ranges(numbers: Iterable[int]) -> str:
    """0-3, 7 for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"


def one_line(text: str) -> str:
    """Text with line breaks and control characters escaped, so that it prints as one line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Put the file's name in front of an ArtifactError's line, unless it begins with it."""
    try:
        yield
    except ArtifactError as error:
        text = one_line(str(error))
        name = one_line(os.fspath(path))
        if len(text) > _LONGEST_LINE:
            text = f"{text[:_LONGEST_LINE]}..."
        if not text.startswith(f"{name}: "):
            text = f"{name}: {text}"
        raise ArtifactError(text) from None
