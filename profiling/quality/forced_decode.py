"""Texts decoded token by token as they stand: what each token loses, by method, by text and by position.

Shapes: T texts, of which B are decoded together, S tokens of each, F forced ones at their end, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from artifacts.page_layout import aligned
from profiling.progress import bar
from profiling.prompts.prompt import Prompt
from profiling.quality.answers import negative_log_likelihood
from profiling.quality.intervals import Interval, student

# Tokens of a mean that is kept.
BLOCK = 64
# Parts of the forced tokens whose perplexities stand side by side, each of so many tokens at least.
_PARTS, _LEAST = 4, 128
# Texts that are decoded together: a step reads the weights once for all of them.
_TOGETHER = 8


class Begun(NamedTuple):
    """Texts (B, S) whose cache has all but their forced tokens, and the logits of the first of these (B, V)."""

    ids: Tensor
    cache: Any
    logits: Tensor


@torch.no_grad()
def begin(model: Any, cache: Callable[[], Any], texts: Sequence[Prompt], forced: int) -> Iterator[Begun]:
    """Prefill texts of one length, some together, by the attention that is applied."""
    for start in range(0, len(texts), _TOGETHER):
        ids = torch.tensor([text.input_ids for text in texts[start : start + _TOGETHER]], device=model.device)
        made = cache()
        first = model(ids[:, :-forced], past_key_values=made, use_cache=True, logits_to_keep=1).logits[:, -1]
        yield Begun(ids, made, first)


@torch.no_grad()
def steps(model: Any, begun: Begun, forced: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Each forced token (B), with log p of every token where it stands (B, V) fp32; the cache takes them in."""
    ids, cache, logits = begun
    start = ids.shape[1] - forced
    for at in bar(range(start, ids.shape[1]), desc="forced decode"):
        if at > start:
            logits = model(ids[:, at - 1 : at], past_key_values=cache, use_cache=True).logits[:, -1]
        yield ids[:, at], logits.float().log_softmax(-1)


def forced_losses(model: Any, begun: Iterator[Begun] | Sequence[Begun], forced: int) -> Tensor:
    """-log p of the last `forced` tokens of each text (T, F), decoded one by one.

    begun: of `begin`; if it is a sequence its caches are copied and serve again.
    """
    found = []
    for some in begun:
        own = some._replace(cache=copy.deepcopy(some.cache)) if isinstance(begun, Sequence) else some
        losses = [-log_probs.gather(1, tokens[:, None])[:, 0] for tokens, log_probs in steps(model, own, forced)]
        found.append(torch.stack(losses, dim=1))
    return torch.cat(found)


def dense_losses(model: Any, texts: Sequence[Prompt], forced: int) -> Tensor:
    """The same by the attention that is applied in one prefill, which is what a cache that keeps everything gives."""
    return torch.stack([negative_log_likelihood(model, text)[-forced:] for text in texts])


def in_blocks(losses: Tensor) -> tuple[tuple[float, ...], ...]:
    """Means of (T, F) losses over BLOCK tokens each, text by text."""
    return tuple(tuple(part.mean().item() for part in text.split(BLOCK)) for text in losses)


def apart(losses: Tensor, others: Tensor) -> Interval:
    """Losses less those of the same tokens by another method, nats a token, over texts."""
    return student((losses - others).double().mean(1).tolist())


def changed(interval: Interval) -> str:
    """A difference of losses as one of perplexities; a single text has no interval."""
    value, low, high = (100 * math.expm1(each) for each in (interval.value, interval.low, interval.high))
    return f"{value:+.2f}%" + (f" ({low:+.2f} to {high:+.2f})" if interval.count > 1 else "")


@dataclass(frozen=True, kw_only=True)
class Part:
    """Forced tokens from one place on: their perplexity, and their loss less the dense one, as `apart` says it.

    change: None of dense attention itself.
    """

    start: int
    perplexity: float
    change: Interval | None


def by_position(losses: Mapping[str, Tensor], dense: Tensor) -> dict[str, list[Part]]:
    """Parts of the forced tokens (T, F) by method; of none where they are too few."""
    size = -(-dense.shape[1] // _PARTS)
    if size < _LEAST:
        return {}
    starts = range(0, dense.shape[1], size)

    def parts(own: Tensor) -> list[Part]:
        pairs = zip(starts, own.split(size, 1), dense.split(size, 1), strict=True)
        return [
            Part(start=start, perplexity=math.exp(a.mean()), change=None if own is dense else apart(a, b))
            for start, a, b in pairs
        ]

    return {name: parts(own) for name, own in losses.items()}


def position_lines(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Lines of a table of `by_position`, its parts as mappings; of nothing none."""
    if not found:
        return []
    lines = [["perplexity by position", *(f"from {part['start']}" for part in next(iter(found.values())))]]
    for name, parts in found.items():
        changes = [f" {changed(Interval(**part['change']))}" if part["change"] else "" for part in parts]
        lines.append(
            [name, *(f"{part['perplexity']:.2f}{change}" for part, change in zip(parts, changes, strict=True))]
        )
    return aligned(lines)
