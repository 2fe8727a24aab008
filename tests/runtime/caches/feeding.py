"""Feeds a model chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


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
