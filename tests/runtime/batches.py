"""Layouts of batches of unlike sequences."""

from __future__ import annotations

import torch
from torch import Tensor

# Real tokens [begin, end) of each sequence's prompt. Those of fewer than 128 are dense.
LAYOUTS: dict[str, list[tuple[int, int]]] = {
    "129": [(0, 129)],
    "256": [(0, 256)] * 2,
    "left": [(0, 260), (150, 260), (55, 260)],
    "right": [(0, 260), (0, 110), (0, 205)],
    "alike and empty": [(0, 0), (50, 260), (50, 260)],
}


def real_of(layout: str, more: int = 0) -> Tensor:
    """The attention mask (B, width + more) of a layout, of which `more` tokens are generated."""
    ranges = LAYOUTS[layout]
    width = max(end for _, end in ranges)
    real = torch.zeros(len(ranges), width + more, dtype=torch.long)
    for row, (begin, end) in zip(real, ranges, strict=True):
        row[begin:end] = 1
        row[width:] = 1
    return real


def given(real: Tensor) -> dict[str, Tensor]:
    """What a model is given beside the tokens of a padded batch."""
    return {"attention_mask": real, "position_ids": (real.cumsum(1) - 1).clamp(min=0)}
