"""Texts of any length in which no stretch comes twice."""

from __future__ import annotations

import random
from pathlib import Path

from profiling.prompts.words import sentences


def story(path: Path, characters: int) -> str:
    """Write such a text; the task that makes windows of it."""
    source = sentences(random.Random(0))
    path.write_text("".join(f"{i}. {next(source)}" for i in range(4000))[:characters])
    return f"text:{path}"
