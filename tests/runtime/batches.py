"""Layouts of batches of unlike sequences, a model that is fed chunk by chunk, and one with another
attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import sdpa_mask

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


def real_from(width: int, *begins: int) -> Tensor:
    """The attention mask (B, width) of sequences before whose first tokens there is padding."""
    return (torch.arange(width) >= torch.tensor(begins)[:, None]).long()


def given(real: Tensor) -> dict[str, Tensor]:
    """What a model is given beside the tokens of a padded batch."""
    return {"attention_mask": real, "position_ids": (real.cumsum(1) - 1).clamp(min=0)}


def chunks_of(n: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Chunks [begin, end) of n tokens by their sizes, the last size repeated."""
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
    """Logits (B, n, vocabulary) of tokens (B, n) fed in chunks of these sizes, the last size again
    and again.

    cache: transformers' own if None. attention_mask: of what the cache holds and the tokens."""
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
    """All attention of the model by a function of transformers' attention interface."""
    AttentionInterface.register("of_a_test", attention)
    AttentionMaskInterface.register("of_a_test", sdpa_mask)
    former = model.config._attn_implementation
    model.set_attn_implementation("of_a_test")
    try:
        yield
    finally:
        model.set_attn_implementation(former)
