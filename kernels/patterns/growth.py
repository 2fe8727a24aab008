"""Sizes that go with the number of keys: what a pattern found at one length becomes at another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from kernels.index import num_tiles
from kernels.patterns.base import Pattern


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Sizes that hold at `length` keys and elsewhere go with powers of the number of keys.

    powers: by kind and field, from 0 (the size stays) to 1 (its share of the keys stays). Fields
    that are not named
        keep their size. Lengths count in whole tiles, so that a cache that grows does not plan anew
        for every token.
    """

    length: int
    powers: Mapping[str, Mapping[str, float]]

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"growth: length must be at least 1, got {self.length}")
        for kind, powers in self.powers.items():
            for field, power in powers.items():
                if not 0 <= power <= 1:
                    raise ValueError(
                        f"growth: the power of {kind}'s {field} must be from 0 to 1, got {power!r}"
                    )

    def ratio(self, k_len: int) -> float:
        """Tiles of `k_len` keys over those of `length`."""
        return num_tiles(k_len) / num_tiles(self.length)

    def grown(self, pattern: Pattern, k_len: int) -> Pattern:
        """The pattern for `k_len` keys: a size s becomes max(1, round(s * ratio ** power)).

        Raises:
            ValueError: the pattern's kind has no such field, or it is no size.
        """
        powers = self.powers.get(pattern.kind)
        if not powers:
            return pattern
        sizes = {field.name for field in fields(pattern) if "fault" not in field.metadata}
        if unknown := sorted(set(powers) - sizes):
            known = ", ".join(sorted(sizes)) or "none"
            raise ValueError(f"growth: {pattern.kind} has no size {unknown[0]!r}; it has: {known}")
        ratio = self.ratio(k_len)
        return replace(
            pattern,
            **{
                name: max(1, round(getattr(pattern, name) * ratio**power))
                for name, power in powers.items()
            },
        )
