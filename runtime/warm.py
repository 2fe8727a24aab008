"""Compiles and measures before the first request, so that it waits for nothing but its own tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from artifacts import HeadwiseError
from runtime.attention.state import settings_of
from runtime.layers import text_config

# Tokens of a turn after a prompt: few beside it, and more than decode takes.
_TURN = 128


def warm_up(
    model: Any, lengths: Sequence[int], new_cache: Callable[[], Any] | None = None, *, batch: int = 1
) -> dict[int, float]:
    """See runtime.warm_up."""
    settings = settings_of(text_config(model))
    if settings is None:
        raise HeadwiseError("warm_up wants a model that an artifact is applied to")
    limit = getattr(text_config(model), "max_position_embeddings", None) or max(lengths, default=1)
    for length in lengths:
        if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= limit:
            raise HeadwiseError(f"warm_up takes lengths of 1 to {limit} tokens, got {length!r}")
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise HeadwiseError(f"warm_up takes a batch of 1 sequence or more, got {batch!r}")
    seconds = {}
    with settings.uncounted():
        for length in lengths:
            start = time.perf_counter()
            _serve(model, length, limit, None if new_cache is None else new_cache())
            if batch > 1 and length > 1:
                _serve(model, length, limit, None if new_cache is None else new_cache(), batch=batch)
            seconds[length] = time.perf_counter() - start
    return seconds


def _serve(model: Any, length: int, limit: int, cache: Any, *, batch: int = 1) -> None:
    """A prompt of so many tokens, two steps of decode, and a turn after them; a batch's first prompt is one shorter."""
    with torch.no_grad():
        # Unlike tokens, for patterns that look for what stands out.
        ids = torch.arange(length, device=model.device).expand(batch, -1) % text_config(model).vocab_size
        mask = torch.ones_like(ids[:, :0])
        for new in (length, 1, 1, min(_TURN, limit - length - 2)):
            if new < 1:
                break
            tokens = ids[:, -new:]
            mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
            if batch > 1:
                mask[0, 0] = 0
            padding = mask if batch > 1 else None
            found = model(tokens, attention_mask=padding, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = found.past_key_values
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
