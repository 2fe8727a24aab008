"""Reads other tools' files as what they are: text from somewhere, to be believed in nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from artifacts.errors import ArtifactError, one_line, reason, shorten

# A hundred layers of a hundred heads, a value a line, come to 1.5 MiB.
MAX_BYTES = 4 * 2**20


def read_bytes(path: Path) -> bytes:
    """The file's bytes.

    Raises:
        ArtifactError: there is no such file, it cannot be read, is no regular file or has more than 4 MiB.
    """
    shown = one_line(str(path))
    if not path.exists():
        raise ArtifactError(f"{shown}: no such file")
    if not path.is_file():
        raise ArtifactError(f"{shown}: is no regular file")
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ArtifactError(f"{shown}: cannot be read, {reason(error)}") from None
    if len(data) > MAX_BYTES:
        raise ArtifactError(f"{shown}: has more than {MAX_BYTES} bytes, too large for a file of head patterns")
    return data


def parse_text(path: Path, data: bytes) -> str:
    """The bytes as text.

    Raises:
        ArtifactError: they are not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{one_line(str(path))}: not UTF-8 text (byte {error.start})") from None


def parse_json(path: Path, data: bytes) -> Any:
    """The JSON value in a file's bytes.

    Raises:
        ArtifactError: it is no JSON, has a key twice, a NaN or an infinity, or is nested too deep.
    """
    shown = one_line(str(path))
    try:
        return json.loads(parse_text(path, data), object_pairs_hook=_unique, parse_constant=_constant)
    except json.JSONDecodeError as error:
        raise ArtifactError(f"{shown}: line {error.lineno}: not valid JSON, {error.msg.lower()}") from None
    except RecursionError:
        raise ArtifactError(f"{shown}: nested too deep") from None
    except ArtifactError as error:
        raise ArtifactError(f"{shown}: {error}") from None
    except ValueError:
        # A whole number of thousands of digits, which Python refuses to read.
        raise ArtifactError(f"{shown}: holds a number of too many digits") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ArtifactError(f"the key {shorten(twice)} is given twice: remove one")
    return made


def _constant(name: str) -> Any:
    raise ArtifactError(f"holds {name}: numbers must be finite")


def bare(path: Path) -> str:
    """The file's name, as an artifact records it."""
    return path.name.encode(errors="replace").decode()
