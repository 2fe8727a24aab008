"""Tri-shape: an A-shape whose last queries see every key (SCBench, Li 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from kernels.patterns.a_shape import AShape


@dataclass(frozen=True, kw_only=True)
class TriShape(AShape):
    """The first `sink` keys, the last `window` before each query, and all keys for the last `last`
    queries.

    In tokens. The rows of tiles that hold one of the last queries are computed whole.
    """

    kind: ClassVar[str] = "tri_shape"

    last: int

    @classmethod
    def dense_tail(cls, patterns: Sequence[Self]) -> tuple[int, ...]:
        """See Fixed.dense_tail."""
        return tuple(p.last for p in patterns)
