"""Compiles and measures before the first request, so that it waits for nothing but its own tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from artifacts import HeadwiseError
from runtime.attention.state import Calls, settings_of
from runtime.layers import text_config


def warm_up(model: Any, lengths: Sequence[int], new_cache: Callable[[], Any] | None = None) -> dict[int, float]:
    """See runtime.warm_up."""
    settings = settings_of(text_config(model))
    if settings is None:
        raise HeadwiseError("warm_up wants a model that an artifact is applied to")
    limit = getattr(text_config(model), "max_position_embeddings", None) or max(lengths, default=1)
    for length in lengths:
        if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= limit:
            raise HeadwiseError(f"warm_up takes lengths of 1 to {limit} tokens, got {length!r}")
    calls, watch, seconds = settings.calls, settings.watch, {}
    settings.calls = Calls()
    settings.watch = None if watch is None else type(watch)(watch.min_recall)
    try:
        for length in lengths:
            start = time.perf_counter()
            _serve(model, length, None if new_cache is None else new_cache())
            seconds[length] = time.perf_counter() - start
    finally:
        settings.calls, settings.watch = calls, watch
    return seconds


def _serve(model: Any, length: int, cache: Any) -> None:
    """A prompt of so many tokens and two steps of decode."""
    with torch.no_grad():
        # Unlike tokens, for patterns that look for what stands out.
        ids = torch.arange(length, device=model.device)[None] % text_config(model).vocab_size
        found = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        for _ in range(2):
            model(ids[:, -1:], past_key_values=found.past_key_values, use_cache=True)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
