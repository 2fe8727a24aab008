"""The resume file of long work: one line for each finished part, so that a killed run goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from artifacts import HeadwiseError

_FORMAT = 1


class Journal:
    """An append-only file of JSON lines, each with a digest of its content; the first line says whose work it is.

    A line that was cut off by a kill is dropped; any other damage is an error, since results would be lost in silence.
    """

    def __init__(self, path: Path, records: dict[str, Any]) -> None:
        self.path = path
        self._records = records

    @classmethod
    def open(cls, path: Path, settings: dict[str, Any], *, fresh: bool) -> Self:
        """Start the file, or go on with it if it was written by a run with the same settings.

        Raises:
            HeadwiseError: the file is damaged, or belongs to a run with other settings and `fresh` is not set.
        """
        header = {"format": _FORMAT, "settings": settings}
        if fresh or not path.exists():
            journal = cls(path, {})
            journal._replace([header])
            return journal
        lines = _read(path)
        if not lines or lines[0].get("format") != _FORMAT:
            raise _damaged(path, 1)
        if (found := lines[0]["settings"]) != settings:
            name = next(key for key in {**settings, **found} if settings.get(key) != found.get(key))
            raise HeadwiseError(
                f"resume file {path} belongs to another run: its {name} is {found.get(name)!r}, not "
                f"{settings.get(name)!r}; repeat that command to finish it, or pass --fresh to discard it"
            )
        journal = cls(path, {line["key"]: line["value"] for line in lines[1:]})
        journal._replace(lines)
        return journal

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def __getitem__(self, key: str) -> Any:
        return self._records[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def add(self, key: str, value: Any) -> None:
        """Append a result; when this returns it survives a kill."""
        # Through JSON at once, so that a run and its resumption compute on the very same numbers.
        text = _line({"key": key, "value": value})
        with self.path.open("ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        self._records[key] = json.loads(text)["content"]["value"]

    def remove(self) -> None:
        """Delete the file: the work is finished."""
        self.path.unlink(missing_ok=True)

    def _replace(self, lines: list[dict[str, Any]]) -> None:
        beside = self.path.with_name(self.path.name + ".new")
        beside.write_text("".join(_line(line) for line in lines))
        os.replace(beside, self.path)


def _line(content: dict[str, Any]) -> str:
    return json.dumps({"sha256": _digest(content), "content": content}) + "\n"


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> list[dict[str, Any]]:
    raw = path.read_bytes().split(b"\n")
    lines = []
    # What stands after the last newline was being written when the process died.
    for number, text in enumerate(raw[:-1], start=1):
        try:
            line = json.loads(text)
            content: dict[str, Any] = line["content"]
            whole = line["sha256"] == _digest(content)
        except (ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            raise _damaged(path, number)
        lines.append(content)
    return lines


def _damaged(path: Path, line: int) -> HeadwiseError:
    return HeadwiseError(f"resume file {path} is damaged at line {line}; pass --fresh to discard it and start again")
