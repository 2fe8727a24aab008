"""MInference's list of head patterns, which AngelSlim writes too."""

from __future__ import annotations

from artifacts.interop.format import HEADS, Format
from artifacts.interop.read_heads import read
from artifacts.interop.write_heads import write

FORMAT = Format(
    name="minference",
    about="MInference's JSON list of head patterns, also within AngelSlim's best_pattern",
    read=read,
    write=write,
    options=HEADS,
    patterns=True,
)
