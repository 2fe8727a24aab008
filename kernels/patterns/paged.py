"""Keys as builders read them: a tensor, or the pages of a serving engine's cache.

Shapes: B batch, G KV heads, K key length, D head dim, P pages of a cache, S tokens of a page, N
pages of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from kernels.checks import EIGHT_BITS, check_pages
from kernels.index import TILE

# Keys that torch copies out of pages at a time, whole tiles.
_AT_ONCE = 256 * TILE


@dataclass(frozen=True, kw_only=True, eq=False)
class Paged:
    """Keys (B, G, K, D) in pages of `cache` (P, S, G, D), named by int32 `table` (B, ceil(K / S)).

    Attributes:
        dtype: of the keys when read, which represents the cache's numbers exactly.
    """

    cache: Tensor
    table: Tensor
    k_len: int
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """Device of the cache."""
        return self.cache.device

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape (B, G, K, D) of the keys."""
        return self.table.shape[0], self.cache.shape[2], self.k_len, self.cache.shape[3]

    @classmethod
    def from_cache(
        cls, cache: Tensor, table: Tensor, lengths: Sequence[int | None], dtype: torch.dtype
    ) -> Self:
        """The keys of sequences of these lengths, one a row of the table; K is the largest of them.

        Raises:
            ValueError: no lengths; a table, a cache or dtypes that do not go together.
        """
        numbers = [length for length in lengths if length is not None]
        if len(numbers) < len(lengths):
            raise ValueError(
                "a block table does not say how many keys there are: k_len does, or ragged"
            )
        size = cache.shape[1]
        k_len = max(numbers)
        if not size:
            raise ValueError("a page must have at least one token")
        check_pages(table, len(numbers), -(-k_len // size), cache)
        if cache.dtype not in (dtype, *EIGHT_BITS):
            raise ValueError(
                f"a cache must be of the queries' dtype, {dtype}, or of 8 bits, got {cache.dtype}"
            )
        return cls(cache=cache, table=table, k_len=k_len, dtype=dtype)


# What builders take for k.
Keys = Tensor | Paged


def of_heads(k: Keys, heads: slice) -> Keys:
    """The keys of some KV heads."""
    if isinstance(k, Tensor):
        return k[:, heads]
    return replace(k, cache=k.cache[:, :, heads])


def of_sequence(k: Keys, s: int, row: int, start: int, length: int) -> Keys:
    """Keys (1, G, length, D) of sequence s: of a row from `start` on, in pages from 0 on."""
    if isinstance(k, Tensor):
        return k[row : row + 1, :, start : start + length]
    return replace(k, table=k.table[s : s + 1], k_len=length)


def part(k: Keys, start: int, stop: int) -> Tensor:
    """Keys start ... stop - 1, (B, G, stop - start, D): a view, or a copy out of pages."""
    if isinstance(k, Tensor):
        return k[:, :, start:stop]
    at = torch.arange(start, stop, device=k.device)
    size = k.cache.shape[1]
    pages = k.table.index_select(1, at // size).long()
    return k.cache[pages, at % size].transpose(1, 2).to(k.dtype)


def parts(k: Keys) -> Iterator[Tensor]:
    """All keys, some at a time: (B, G, some, D).

    A tensor is cut in the same way: results do not depend on whether the keys are paged.
    """
    for begin in range(0, k.shape[2], _AT_ONCE):
        yield part(k, begin, min(begin + _AT_ONCE, k.shape[2]))
