"""Dense causal attention as an index: every diagonal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from kernels.index import SparseIndex, dense_index
from kernels.patterns.base import Pattern

__all__ = ["Dense", "dense_index"]


@dataclass(frozen=True, kw_only=True)
class Dense(Pattern):
    """All keys up to the query."""

    kind: ClassVar[str] = "dense"

    @classmethod
    def prepare(
        cls,
        largest: Sequence[Self],
        heads: Sequence[int],
        q: Tensor,
        k: Tensor,
        *,
        scale: float,
        window: int | None = None,
    ) -> Callable[[Sequence[Self]], SparseIndex]:
        """See Pattern.prepare."""
        index = dense_index(q.shape[0], len(heads), q.shape[2], k.shape[2], q.device)
        return lambda patterns: index
