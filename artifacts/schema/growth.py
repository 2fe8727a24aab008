"""Sizes as functions of length: what patterns that were found at one length become at another."""

from __future__ import annotations

from typing import Annotated, Self, get_args

from pydantic import Field, model_validator

from artifacts.errors import shorten
from artifacts.schema.fields import LARGEST, Count, Record
from artifacts.schema.patterns import TILE, AnyPattern, KindName

Power = Annotated[float, Field(ge=0.0, le=1.0)]

# The number of a prompt's last queries is no size of a pattern.
SIZES: dict[str, tuple[str, ...]] = {
    cls.model_fields["kind"].default: tuple(
        name
        for name, field in cls.model_fields.items()
        if field.annotation is int and name != "last_q"
    )
    for cls in get_args(AnyPattern)
}
"""Of each kind the fields that may grow."""


class Growth(Record):
    """Sizes that hold at `length` tokens and elsewhere go with a power of the length."""

    length: Count = Field(description="where the sizes in `patterns` hold, in tokens")
    powers: dict[KindName, dict[str, Power]] = Field(
        description=(
            "on K keys a size s becomes max(1, round(s * (K / `length`) ** power)), both lengths "
            "in whole tiles of 64; sizes that are not named stay as they are"
        )
    )

    @model_validator(mode="after")
    def _grow(self) -> Self:
        for kind, powers in self.powers.items():
            if wrong := [field for field in powers if field not in SIZES[kind]]:
                growing = ", ".join(SIZES[kind]) or "none"
                raise ValueError(
                    f"powers.{kind} names {shorten(wrong[0])}, sizes of {kind} that may grow are: "
                    f"{growing}"
                )
        return self


def grown(pattern: AnyPattern, growth: Growth | None, length: int) -> AnyPattern:
    """Pattern with its sizes for `length` keys: max(1, round(s * (length / at) ** power)).

    Both lengths count in whole tiles of 64; kernels.patterns.Growth does the same to the kernels'
    patterns."""
    if growth is None:
        powers = {}
    else:
        powers = growth.powers.get(pattern.kind, {})
    if growth is None or not powers:
        return pattern
    ratio = -(-length // TILE) / -(-growth.length // TILE)
    sizes = {
        field: max(1, min(round(getattr(pattern, field) * ratio**power), LARGEST))
        for field, power in powers.items()
    }
    return pattern.model_copy(update=sizes)
