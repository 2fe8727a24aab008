"""Errors that a user can fix."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

# A line may contain the text of a field.
_LONGEST_LINE = 800
_LONGEST_PATH = 400


class HeadwiseError(ValueError):
    """User error. str() is one line with the problem, the value, and the allowed values.

    Commands print it as `error: <line>` and exit with `status` (see artifacts.cli.command). Any
    other exception that reaches the user is a bug.
    """

    status = 2


class Finding(HeadwiseError):
    """Negative result without a user error, such as no artifact that passes its gate."""

    status = 3


class ArtifactError(HeadwiseError):
    """Artifact that cannot be read, trusted or written."""


def shorten(value: object, limit: int = 60) -> str:
    """Return the repr of a value for an error message: one line, at most `limit` characters."""
    # Slice first, so that a 16 MiB string is not quoted in full before it is cut.
    if isinstance(value, str | bytes):
        value = value[: limit + 1]
    text = repr(value)
    if len(text) <= limit:
        return text
    return f"{text[: limit - 4]}...{text[-1]}"


def reason(error: OSError | ValueError) -> str:
    """Return the system's message of an OSError, or Python's about a path with a null byte."""
    return one_line(getattr(error, "strerror", None) or str(error)).lower()


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: 1 head, 2 heads, 1,024 heads."""
    if count == 1:
        plural = ""
    else:
        plural = "s"
    return f"{count:,} {noun}" + plural


def number(value: float) -> str:
    """Format a measured number with four digits, large ones without decimals."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def ranges(numbers: Iterable[int]) -> str:
    """Format numbers as ranges: 0-3, 7 for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"


def one_line(text: str) -> str:
    """Escape line breaks and control characters, so that the text prints as one line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def path_text(path: str | os.PathLike[str]) -> str:
    """Return a path as one line; of one that is too long for any system, the start."""
    text = one_line(os.fspath(path))
    if len(text) > _LONGEST_PATH:
        return f"{text[:_LONGEST_PATH]}..."
    return text


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Prefix the message of an ArtifactError with the file name, unless it has that prefix."""
    try:
        yield
    except ArtifactError as error:
        text = one_line(str(error))
        name = path_text(path)
        if len(text) > _LONGEST_LINE:
            text = f"{text[:_LONGEST_LINE]}..."
        if not text.startswith(f"{name}: "):
            text = f"{name}: {text}"
        raise ArtifactError(text) from None
