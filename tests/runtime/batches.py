"""Layouts of padded batches, chunked forward passes, and a model with another attention
function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import sdpa_mask

# Real tokens [begin, end) of each prompt. Sequences with fewer than 128 tokens are dense.
LAYOUTS: dict[str, list[tuple[int, int]]] = {
    "129": [(0, 129)],
    "256": [(0, 256)] * 2,
    "left": [(0, 260), (150, 260), (55, 260)],
    "right": [(0, 260), (0, 110), (0, 205)],
    "alike and empty": [(0, 0), (50, 260), (50, 260)],
}


def real_of(layout: str, more: int = 0) -> Tensor:
    """Return the attention mask (B, width + more) of a layout with `more` generated tokens."""
    ranges = LAYOUTS[layout]
    width = max(end for _, end in ranges)
    real = torch.zeros(len(ranges), width + more, dtype=torch.long)
    for row, (begin, end) in zip(real, ranges, strict=True):
        row[begin:end] = 1
        row[width:] = 1
    return real


def real_from(width: int, *begins: int) -> Tensor:
    """Return the attention mask (B, width) of left-padded sequences."""
    return (torch.arange(width) >= torch.tensor(begins)[:, None]).long()


def batch_inputs(real: Tensor) -> dict[str, Tensor]:
    """Return the model's keyword inputs for a padded batch, without its tokens."""
    return {"attention_mask": real, "position_ids": (real.cumsum(1) - 1).clamp(min=0)}


def chunks_of(n: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return the chunks [begin, end) of n tokens by size; the last size repeats."""
    chunks = []
    left = list(sizes)
    begin = 0
    while begin < n:
        size = left.pop(0) if len(left) > 1 else left[0]
        chunks.append((begin, min(begin + size, n)))
        begin += size
    return chunks


def fed(
    model: Any,
    tokens: Tensor,
    sizes: Sequence[int],
    cache: Any = None,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Return logits (B, n, vocabulary) of tokens (B, n) fed in chunks; the last size repeats.

    Args:
        cache: transformers' own cache if None.
        attention_mask: covers the cached tokens and the new ones.
    """
    logits = []
    if cache is None:
        cache = DynamicCache(config=model.config)
    for begin, end in chunks_of(tokens.shape[1], sizes):
        more = {}
        if attention_mask is not None:
            past = attention_mask.shape[1] - tokens.shape[1]
            positions = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, past + begin : past + end]
            more = {"attention_mask": attention_mask[:, : past + end], "position_ids": positions}
        chunk = tokens[:, begin:end]
        logits.append(model(chunk, past_key_values=cache, use_cache=True, **more).logits)
    return torch.cat(logits, dim=1)


@contextmanager
def attending(model: Any, attention: Callable[..., Any]) -> Iterator[None]:
    """Run all attention of the model with a function of transformers' attention interface."""
    AttentionInterface.register("of_a_test", attention)
    AttentionMaskInterface.register("of_a_test", sdpa_mask)
    former = model.config._attn_implementation
    model.set_attn_implementation("of_a_test")
    try:
        yield
    finally:
        model.set_attn_implementation(former)
