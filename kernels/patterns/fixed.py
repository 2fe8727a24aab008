"""Patterns that read the shapes of q and k alone: A-shape, tri-shape, dilated, strided.

Shapes: B batch, h heads of one kind in a layer, N key tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from kernels.copies import Copy, kept, on_device
from kernels.index import PAD, TILE, SparseIndex, no_lists, num_rows, num_tiles
from kernels.patterns.base import Builder, Inputs, Pattern


@dataclass(frozen=True, kw_only=True)
class Fixed(Pattern):
    """Base of the patterns that read the shapes of q and k alone."""

    @classmethod
    def entries(
        cls, patterns: Sequence[Self], k_len: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Diagonals and columns of the patterns, (h, any width) int32, ascending and padded."""
        raise NotImplementedError

    @classmethod
    def dense_tail(cls, patterns: Sequence[Self]) -> tuple[int, ...]:
        """For each pattern, how many of the last queries see every key; () for none."""
        return ()

    @classmethod
    def prepare(cls, largest: Sequence[Self], inputs: Inputs) -> Builder:
        """See Pattern.prepare. A sliding window is left to whoever reads the index."""
        batch = inputs.q.shape[0]
        q_len = inputs.q.shape[2]
        k_len = inputs.k.shape[2]
        device = inputs.q.device

        def build(patterns: Sequence[Self]) -> SparseIndex:
            diagonals, columns = (
                copy.read() for copy in _entries(cls, tuple(patterns), batch, k_len, device)
            )
            return SparseIndex.built(
                q_len=q_len,
                k_len=k_len,
                diagonals=diagonals,
                **no_lists(batch, len(patterns), num_rows(q_len, k_len), device=device),
                columns=columns,
                dense_tail=cls.dense_tail(patterns),
            )

        return build


@kept(lambda made: sum(copy.nbytes for copy in made), 1 << 26)
def _entries(
    cls: type[Fixed], patterns: tuple[Fixed, ...], batch: int, k_len: int, device: torch.device
) -> tuple[Copy, ...]:
    """Entries of a batch, made once for each length; not to be written to."""
    with torch.inference_mode(False):
        made = cls.entries(patterns, k_len, torch.device("cpu"))
        return tuple(
            Copy.of(entries.expand(batch, -1, -1).contiguous(), device) for entries in made
        )


@dataclass(frozen=True, kw_only=True)
class AShape(Fixed):
    """The first `sink` keys and the last `window` keys before each query, both in tokens.

    MInference 1.0, section 3; StreamingLLM.

    Whole tiles are computed, so a query may see up to 2 * (TILE - 1) keys more than its window. The
    first tile is always kept."""

    kind: ClassVar[str] = "a_shape"

    sink: int
    window: int

    @classmethod
    def entries(
        cls, patterns: Sequence[Self], k_len: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """See Fixed.entries."""
        local = counted([reach(p.window, k_len) + 1 for p in patterns], [1] * len(patterns), device)
        return local, sink_columns([p.sink for p in patterns], k_len, device)


@dataclass(frozen=True, kw_only=True)
class TriShape(AShape):
    """An A-shape whose last `last` queries see every key (SCBench, Li 2024).

    The rows of tiles that hold one of the last queries are computed whole.
    """

    kind: ClassVar[str] = "tri_shape"

    last: int

    @classmethod
    def dense_tail(cls, patterns: Sequence[Self]) -> tuple[int, ...]:
        """See Fixed.dense_tail."""
        return tuple(p.last for p in patterns)


@dataclass(frozen=True, kw_only=True)
class Dilated(Fixed):
    """The first `sink` keys, and of the tiles of a window of `window` keys every `dilation`-th.

    "StreamingLLM with dilated" among the baselines of MInference 1.0 (section 4); Longformer
    (Beltagy 2020, section 3.1).

    sink and window in tokens; the tiles are counted from the query's own, which is always among
    them. The first tile of keys is always kept."""

    kind: ClassVar[str] = "dilated"

    sink: int
    window: int
    dilation: int

    @classmethod
    def entries(
        cls, patterns: Sequence[Self], k_len: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """See Fixed.entries."""
        counts = [reach(p.window, k_len) // p.dilation + 1 for p in patterns]
        local = counted(counts, [p.dilation for p in patterns], device)
        return local, sink_columns([p.sink for p in patterns], k_len, device)


@dataclass(frozen=True, kw_only=True)
class Strided(Fixed):
    """An A-shape, and beyond its window every `stride`-th diagonal of tiles.

    "StreamingLLM with strided" among the baselines of MInference 1.0 (section 4), up to the first
    key as in Sparse Transformers (Child 2019, section 4.3).

    sink and window in tokens; a tile lies on such a diagonal if its distance from the query's own,
    in tiles, is a multiple of `stride`. The first tile of keys is always kept."""

    kind: ClassVar[str] = "strided"

    sink: int
    window: int
    stride: int

    @classmethod
    def entries(
        cls, patterns: Sequence[Self], k_len: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """See Fixed.entries."""
        near = [reach(p.window, k_len) + 1 for p in patterns]
        # Multiples of the stride below `near` are in the window already.
        first = [-(-n // p.stride) for n, p in zip(near, patterns, strict=True)]
        last = [(num_tiles(k_len) - 1) // p.stride for p in patterns]
        counts = [n + max(b - a + 1, 0) for n, a, b in zip(near, first, last, strict=True)]
        at = torch.arange(max(counts), device=device)
        limit, local, skipped, stride = (
            on_device(tuple(numbers), device)[:, None]
            for numbers in (counts, near, first, [p.stride for p in patterns])
        )
        offsets = torch.where(at < local, at, (at - local + skipped) * stride)
        diagonals = torch.where(at < limit, offsets, PAD).to(torch.int32)
        return diagonals, sink_columns([p.sink for p in patterns], k_len, device)


FIXED: tuple[type[Fixed], ...] = (AShape, TriShape, Dilated, Strided)


def reach(window: int, k_len: int) -> int:
    """Tiles before a query's own that its window of `window` tokens touches."""
    return min(num_tiles(window - 1), num_tiles(k_len) - 1)


def sink_columns(sinks: Sequence[int], k_len: int, device: torch.device) -> Tensor:
    """The first sinks[i] keys of each pattern i, a tile at least: (h, any width) int32, padded."""
    return counted([min(max(sink, TILE), k_len) for sink in sinks], [1] * len(sinks), device)


def counted(counts: Sequence[int], steps: Sequence[int], device: torch.device) -> Tensor:
    """counts[i] numbers 0, step, 2 * step ... for each pattern i: (h, any width) int32, padded."""
    at = torch.arange(max(counts), device=device)
    limit, step = (on_device(tuple(numbers), device)[:, None] for numbers in (counts, steps))
    return torch.where(at < limit, at * step, PAD).to(torch.int32)
