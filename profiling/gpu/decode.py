"""One token's attention over all and over chosen keys, beside torch's, at several lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from profiling.gpu.attention import size_of
from profiling.gpu.steps import Rows, Setting
from profiling.speed.attention_speed import Size
from profiling.speed.decode_speed import DECODE_HEADER, DecodeSpeed, decode_cells, measure_decode

_LENGTHS, _CHOSEN = (131_072, 32_768, 8192, 524_288), 2048


def pieces(step: str, setting: Setting) -> list[str]:
    """See profiling.gpu.steps."""
    return ["200"] if setting.small else [str(length) for length in _LENGTHS]


def run(piece: str, setting: Setting) -> dict[str, Any]:
    """Seconds and bytes; every result is compared first."""
    size = size_of(int(piece), setting)
    chosen, repeats = (64, 1) if setting.small else (_CHOSEN, 20)
    return {"size": asdict(size), "speed": asdict(measure_decode(size, chosen=chosen, repeats=repeats))}


def lines(rows: Rows) -> list[Sequence[str]]:
    """As python -m profiling.bench decode shows it."""
    return [DECODE_HEADER, *(decode_cells(Size(**row["size"]), DecodeSpeed(**row["speed"])) for row in rows.values())]
