"""Dilated: attention sinks and every n-th tile of a local window.

"StreamingLLM with dilated" among the baselines of MInference 1.0 (section 4); Longformer (Beltagy
2020, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from kernels.patterns.fixed import Fixed, counted, reach, sink_columns


@dataclass(frozen=True, kw_only=True)
class Dilated(Fixed):
    """The first `sink` keys, and of the tiles of a window of `window` keys every `dilation`-th.

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
