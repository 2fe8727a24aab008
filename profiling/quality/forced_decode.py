"""Texts decoded token by token as they stand: what each token loses, by method, by text and by position.

Shapes: T texts, F forced tokens of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from artifacts.page_layout import aligned
from profiling.evaluation.intervals import Interval, student
from profiling.prompts.prompt import Prompt
from profiling.quality.divergence import forced_log_probs

# Tokens of a mean that is kept.
BLOCK = 64
# Parts of the forced tokens whose perplexities stand side by side, each of so many tokens at least.
_PARTS, _LEAST = 4, 128


def forced_losses(model: Any, cache: Callable[[], Any], prompts: Sequence[Prompt], forced: int) -> Tensor:
    """-log p of the last `forced` tokens of each prompt (T, F), decoded one by one after a prefill of the others."""
    losses = []
    for prompt in prompts:
        tokens = torch.tensor(prompt.input_ids[-forced:], device=model.device)[:, None]
        losses.append(-forced_log_probs(model, cache(), prompt, forced).gather(1, tokens)[:, 0])
    return torch.stack(losses)


def in_blocks(losses: Tensor) -> tuple[tuple[float, ...], ...]:
    """Means of (T, F) losses over BLOCK tokens each, text by text."""
    return tuple(tuple(part.mean().item() for part in text.split(BLOCK)) for text in losses)


def apart(losses: Tensor, others: Tensor) -> Interval | None:
    """Losses less those of the same tokens by another method, nats a token, over texts; None of a single text."""
    return student((losses - others).double().mean(1).tolist()) if len(losses) > 1 else None


def changed(interval: Interval) -> str:
    """A difference of losses as one of perplexities."""
    value, low, high = (100 * math.expm1(each) for each in (interval.value, interval.low, interval.high))
    return f"{value:+.2f}% ({low:+.2f} to {high:+.2f})"


def by_position(losses: Mapping[str, Tensor], dense: Tensor) -> list[str]:
    """Lines of perplexities over parts of the forced tokens, and how much more they are than dense ones."""
    size = -(-dense.shape[1] // _PARTS)
    if size < _LEAST:
        return []
    starts = range(0, dense.shape[1], size)
    lines = [["perplexity by position", *(f"from {start}" for start in starts)]]
    for name, each in losses.items():
        pairs = zip(each.split(size, 1), dense.split(size, 1), strict=True)
        means = [(a.mean().item(), (a - b).mean().item()) for a, b in pairs]
        lines.append([name, *(f"{math.exp(loss):.2f} ({100 * math.expm1(more):+.1f}%)" for loss, more in means)])
    return aligned(lines)
