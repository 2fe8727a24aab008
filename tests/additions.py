"""CONTRIBUTING's walks, made in a copy of the packages: the lines that each one adds."""

from __future__ import annotations

from pathlib import Path


def add(folder: Path, walk: dict[str, dict[str, str]]) -> None:
    """Insert the texts of a walk into files of `folder`.

    Args:
        folder: copy of the packages.
        walk: by file, the text to insert before, which must be there, and the text to insert; no
            text to insert before for a new file.
    """
    for file, additions in walk.items():
        path = folder / file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for before, addition in additions.items():
            assert before in text, f"{file} has no {before!r}: change CONTRIBUTING and this walk"
            text = text.replace(before, addition + before, 1)
        path.write_text(text, encoding="utf-8")
