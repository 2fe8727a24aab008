"""Sizes as functions of length: what patterns that were found at one length become at another."""

from __future__ import annotations

from typing import Annotated, Self, get_args

from pydantic import Field, model_validator

from artifacts.errors import shorten
from artifacts.fields import Count, KindName
from artifacts.patterns import TILE, AnyPattern, Record

Power = Annotated[float, Field(ge=0.0, le=1.0)]


def _sizes(cls: type[Record]) -> tuple[str, ...]:
    """Its fields that are sizes without an upper limit: no shares, no names, and no last_q."""
    fields = cls.model_fields.items()
    return tuple(n for n, f in fields if f.annotation is int and not any(hasattr(m, "le") for m in f.metadata))


SIZES: dict[str, tuple[str, ...]] = {cls.model_fields["kind"].default: _sizes(cls) for cls in get_args(AnyPattern)}
"""Of each kind the fields that may grow."""


class Growth(Record):
    """The patterns' sizes hold at `length` tokens; at others a named size goes with a power of the length.

    powers: of each kind the fields that grow, each with its power: 0 stays as it is, 1 keeps its share of the prompt.
        Fields that are not named keep their size.
    """

    length: Count
    powers: dict[KindName, dict[str, Power]]

    @model_validator(mode="after")
    def _grow(self) -> Self:
        for kind, powers in self.powers.items():
            if wrong := [field for field in powers if field not in SIZES[kind]]:
                known = ", ".join(SIZES[kind]) or "none"
                raise ValueError(f"powers.{kind} names {shorten(wrong[0])}, sizes of {kind} that may grow are: {known}")
        return self


def grown(pattern: AnyPattern, growth: Growth | None, length: int) -> AnyPattern:
    """The pattern with the sizes that it has on `length` keys: s becomes max(1, round(s * (length / at) ** power)).

    Both lengths count in whole tiles of 64; kernels.patterns.growth does the same to the kernels' patterns.
    """
    powers = {} if growth is None else growth.powers.get(pattern.kind, {})
    if growth is None or not powers:
        return pattern
    ratio = -(-length // TILE) / -(-growth.length // TILE)
    sizes = {field: max(1, round(getattr(pattern, field) * ratio**power)) for field, power in powers.items()}
    return pattern.model_copy(update=sizes)
