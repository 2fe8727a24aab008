"""What is asked about the heads of an artifact."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked about which artifact: one head (layer, head), all heads of a layer (layer, None), or all."""

    file: Path
    layer: int | None = None
    head: int | None = None
    model: str | None = None
    length: int | None = None
    task: str | None = None
    dtype: str | None = None
    device: str = "cpu"
    out: Path | None = None
    command: str = ""
