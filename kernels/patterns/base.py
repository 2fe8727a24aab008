"""What every attention pattern is: a frozen set of sizes and a builder that lowers many heads at once.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, h heads of one kind in a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Self

from torch import Tensor

from kernels.index import SparseIndex


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """Base of all patterns: fields are positive integers, sizes in tokens unless the pattern says otherwise."""

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{self.kind}: {field.name} must be a positive integer, got {value!r}")

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
        """Do what does not depend on the sizes once, for building many indices over the same tensors.

        Args:
            largest: h patterns of this kind, one a head; no later pattern may be larger or differ in `last_q`.
            heads: the h query heads of q that they belong to.
            q: (B, H, Q, D) queries, the last Q of the K positions.
            k: (B, G, K, D) keys; query head i reads KV head i // (H // G).
            scale: factor on the logits.

        Returns:
            A function from h patterns to the index of those h heads.
        """
        raise NotImplementedError

    @classmethod
    def build_index(
        cls,
        patterns: Sequence[Self],
        heads: Sequence[int],
        q: Tensor,
        k: Tensor,
        *,
        scale: float,
        window: int | None = None,
    ) -> SparseIndex:
        """The index of h heads in one call; arguments as in `prepare`."""
        return cls.prepare(patterns, heads, q, k, scale=scale, window=window)(patterns)
