"""Vertical-slash: columns and diagonals chosen at run time (MInference 1.0, Algorithms 2, 4).

A build is `estimate`, which reads q and k, and `Lines`, which selects by the estimate.

Shapes: B batch, h heads of this kind, K key length, N key tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch

from kernels.index import TILE, num_tiles
from kernels.patterns.base import SHARE, Builder, Entries, Inputs, Pattern
from kernels.patterns.last_queries import EstimateCall, Masses
from kernels.topk import ascending, best


@dataclass(frozen=True, kw_only=True)
class VerticalSlash(Pattern):
    """The `vertical` columns and `slash` diagonals most attended to by the last `last_q` queries.

    With a `coverage`, only the smallest sets of columns and of diagonals that each hold this share
    of that attention, still at most `vertical` and `slash` of them (FlexPrefill, Lai 2025,
    Algorithm 3). The first tile of columns and the first TILE diagonals are always among them and
    count towards both sizes.
    """

    kind: ClassVar[str] = "vertical_slash"
    growing: ClassVar[tuple[str, ...]] = ("vertical", "slash")

    vertical: int
    slash: int
    last_q: int = 64
    coverage: float | None = field(default=None, metadata=SHARE)

    def limits(self) -> tuple[int, int]:
        """See Pattern.limits."""
        return max(self.vertical, TILE), max(self.slash, TILE)

    @classmethod
    def prepare(cls, largest: Sequence[Self], inputs: Inputs) -> Builder:
        """See Pattern.prepare."""
        heads, q, k, scale, window = inputs
        masses = EstimateCall(
            q, k, heads, [p.last_q for p in largest], scale=scale, window=window
        ).run()
        return Lines.read(inputs, masses=masses)


@dataclass(frozen=True, kw_only=True, eq=False)
class Lines(Builder):
    """A builder of columns and diagonals from `masses` of the h heads (Algorithm 4)."""

    masses: Masses

    def widths(self, patterns: Sequence[VerticalSlash]) -> tuple[tuple[int, int, int], ...]:
        """See Builder."""
        n = num_tiles(self.k_len)
        limits = [p.limits() for p in patterns]
        return tuple((min(n, 2 * d), 0, min(c, self.k_len)) for c, d in limits)

    def entries(self, place: int, pattern: VerticalSlash) -> Entries:
        """See Builder.entries.

        A diagonal at distance s crosses the tiles at offsets floor(s / TILE) and ceil(s / TILE), in
        every row alike.
        """
        n = num_tiles(self.k_len)
        columns, distances = (
            best(mass[:, place], size, coverage=pattern.coverage, forced=TILE)
            for mass, size in zip(
                (self.masses.vertical, self.masses.slash()), pattern.limits(), strict=True
            )
        )
        distance = distances.to(torch.int64)
        offsets = torch.zeros(self.batch, n + 1, dtype=torch.bool, device=self.device)
        for rounding in (0, TILE - 1):
            offsets.scatter_(-1, ((distance + rounding) // TILE).clamp_max_(n), True)
        return Entries(ascending(offsets[:, :n], n), columns, None)
