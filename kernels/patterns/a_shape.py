"""A-shape: attention sinks and a local window (MInference 1.0, section 3; StreamingLLM)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from kernels.patterns.fixed import Fixed, counted, reach, sink_columns


@dataclass(frozen=True, kw_only=True)
class AShape(Fixed):
    """The first `sink` keys and the last `window` keys before each query, both in tokens.

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
