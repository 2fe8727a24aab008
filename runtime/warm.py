"""Compiles and measures before the first request, so that it waits for nothing but its own tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from artifacts import HeadwiseError
from runtime.attention.state import settings_of
from runtime.layers import text_config
from runtime.measured import wait

# Tokens of a turn after a prompt: few beside it, and more than decode takes.
_TURN = 128


def warm_up(
    model: Any, lengths: Sequence[int], *, batch: int = 1, new_cache: Callable[[], Any] = lambda: None
) -> dict[int, float]:
    """Serve a prompt of each length, two tokens and a turn after it: kernels are compiled, dense attention is measured.

    Args:
        model: a model that an artifact is applied to (`apply`, `apply_dense`); nobody else may be using it yet.
        lengths: tokens of the prompts that are to be expected: one below dense_below and the longest, as a rule.
        batch: with 2 or more a padded batch of so many prompts is served after each, too: padding has builds of its
            own. It takes the memory that such a batch takes.
        new_cache: makes the cache of each prompt; None lets the model do it.

    Returns:
        Seconds that each took, compiling and measuring included. stats() counts none of it.

    Raises:
        HeadwiseError: nothing is applied to the model; a length is no number of tokens that it can take; a batch of
            none.
    """
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
            for size in (1, batch) if batch > 1 and length > 1 else (1,):
                _serve(model, length, limit, new_cache(), size)
            seconds[length] = time.perf_counter() - start
    return seconds


def _serve(model: Any, length: int, limit: int, cache: Any, batch: int) -> None:
    """A prompt of so many tokens, two steps of decode, and a turn after them; a batch's first prompt is one shorter."""
    with torch.no_grad():
        # Unlike tokens, for patterns that look for what stands out.
        ids = torch.arange(length, device=model.device).expand(batch, -1) % text_config(model).vocab_size
        mask = torch.ones(batch, length + 2 + _TURN, dtype=torch.long, device=model.device)
        mask[0, 0] = 0
        seen = 0
        for new in (length, 1, 1, min(_TURN, limit - length - 2)):
            if new < 1:
                break
            tokens = ids[:, -new:]
            seen += tokens.shape[1]
            padding = mask[:, :seen] if batch > 1 else None
            found = model(tokens, attention_mask=padding, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = found.past_key_values
    wait(model.device)
