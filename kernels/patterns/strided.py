"""Strided: attention sinks, a local window, and beyond it every n-th diagonal of tiles.

"StreamingLLM with strided" among the baselines of MInference 1.0 (section 4), up to the first key
as in Sparse Transformers (Child 2019, section 4.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from kernels.copies import on_device
from kernels.index import PAD, num_tiles
from kernels.patterns.fixed import Fixed, reach, sink_columns


@dataclass(frozen=True, kw_only=True)
class Strided(Fixed):
    """The first `sink` keys, the last `window` before each query, and every `stride`-th diagonal of
    tiles.

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
