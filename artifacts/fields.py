"""What fields of several sections hold: counts, shares and names, with what is said of a wrong one."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from artifacts.patterns import KINDS, matching


def _share(value: float) -> float:
    # Means of float32 shares end up a rounding error above one.
    if not 0.0 <= value <= 1.0001:
        raise ValueError("must be from 0 to 1")
    return min(value, 1.0)


Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, AfterValidator(_share)]
Positive = Annotated[float, Field(gt=0.0)]
KindName = Annotated[str, matching("|".join(KINDS), f"one of {', '.join(KINDS)}")]
PatternName = Annotated[
    str,
    matching("[A-Za-z][A-Za-z0-9_.-]{0,63}", "a letter and then up to 63 letters, digits, '_', '.' or '-'"),
]
Rows = tuple[tuple[PatternName, ...] | None, ...]
