"""Layouts of batches of unlike sequences, and a model that is fed chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def fed(model: Any, tokens: Tensor, sizes: Sequence[int], cache: Any, **given: Any) -> Tensor:
    """Logits (B, n, vocabulary) of tokens (B, n) fed in chunks of these sizes, the last size again
    and again."""
    logits, at, sizes = [], 0, list(sizes)
    real = given.pop("attention_mask", None)
    while at < tokens.shape[1]:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        end = min(at + size, tokens.shape[1])
        more = {}
        if real is not None:
            positions = (real.cumsum(1) - 1).clamp(min=0)
            more = {"attention_mask": real[:, :end], "position_ids": positions[:, at:end]}
        logits.append(
            model(tokens[:, at:end], past_key_values=cache, use_cache=True, **more, **given).logits
        )
        at = end
    return torch.cat(logits, dim=1)
