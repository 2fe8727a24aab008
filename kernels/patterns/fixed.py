"""What patterns share that are the same whatever the prompt says: their entries are counted, not
chosen.

Shapes: B batch, h heads of one kind in a layer, N key tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kernels.copies import Copy, on_device
from kernels.index import PAD, TILE, SparseIndex, no_lists, num_rows, num_tiles
from kernels.kept import kept
from kernels.patterns.base import Pattern
from kernels.patterns.paged import Keys


@dataclass(frozen=True, kw_only=True)
class Fixed(Pattern):
    """Base of the patterns that read the shapes of q and k alone."""

    @classmethod
    def entries(
        cls, patterns: Sequence[Self], k_len: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Diagonals (h, any width) and columns (h, any width) of each pattern, int32, ascending and
        padded."""
        raise NotImplementedError

    @classmethod
    def dense_tail(cls, patterns: Sequence[Self]) -> tuple[int, ...]:
        """For each pattern, how many of the last queries see every key; () for none."""
        return ()

    @classmethod
    def prepare(
        cls,
        largest: Sequence[Self],
        heads: Sequence[int],
        q: Tensor,
        k: Keys,
        *,
        scale: float,
        window: int | None = None,
    ) -> Callable[[Sequence[Self]], SparseIndex]:
        """See Pattern.prepare. A sliding window is left to whoever reads the index."""
        batch = q.shape[0]
        q_len = q.shape[2]
        k_len = k.shape[2]
        device = q.device

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
    """What `cls.entries` says, for a batch: made once for each length, not to be written to."""
    with torch.inference_mode(False):
        made = cls.entries(patterns, k_len, torch.device("cpu"))
        return tuple(
            Copy.of(entries.expand(batch, -1, -1).contiguous(), device) for entries in made
        )


def reach(window: int, k_len: int) -> int:
    """Tiles before a query's own that its window of `window` tokens touches: it reaches back over
    window - 1 keys."""
    return min(num_tiles(window - 1), num_tiles(k_len) - 1)


def sink_columns(sinks: Sequence[int], k_len: int, device: torch.device) -> Tensor:
    """The first sinks[i] keys of each pattern i, at least a tile of them: (h, the largest count)
    int32, padded."""
    return counted([min(max(sink, TILE), k_len) for sink in sinks], [1] * len(sinks), device)


def counted(counts: Sequence[int], steps: Sequence[int], device: torch.device) -> Tensor:
    """0, step, 2 * step, ... counts[i] numbers for each pattern i, padded: (h, the largest count)
    int32."""
    at = torch.arange(max(counts), device=device)
    limit, step = (on_device(tuple(numbers), device)[:, None] for numbers in (counts, steps))
    return torch.where(at < limit, at * step, PAD).to(torch.int32)
