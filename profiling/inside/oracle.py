"""Oracle top-k attention: the keys of the highest exact scores of each query, head by head.

What no pattern of that density can beat by choosing keys, for it knows all scores. Plain torch: for
measurements only.

Shapes: H query heads, G KV heads, Q query length, K key length, D head dim; batch 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from artifacts import HeadwiseError
from profiling.inside.capture import attending_with
from runtime.attention.dense import fastest_dense

NAME = "headwise_oracle"
_BLOCK = 64
Attend = Callable[[Tensor, Tensor, Tensor, float, int], Tensor]
"""From q, k, v, the scale and the layer's number to the output (1, H, Q, D)."""


@contextmanager
def oracle(model: Any, density: float, *, tail: int = 0) -> Iterator[None]:
    """Prefill by oracle top-k in full-attention layers; other layers and decode are dense.

    Args:
        model: any transformers causal model whose attention goes through AttentionInterface.
        density: fraction of a query's causal keys that it attends to.
        tail: the last so many queries attend to every key.

    Raises:
        HeadwiseError: a density that is none.
    """
    if not 0 < density <= 1:
        raise HeadwiseError(f"density must be above 0 and at most 1, got {density}")

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
        return top_k_attention(q, k, v, density=density, tail=tail, scale=scale)

    with choosing(model, attend):
        yield


@contextmanager
def choosing(model: Any, attend: Attend | None) -> Iterator[None]:
    """Prefill by `attend`, or sdpa if None, in full-attention layers; the rest is dense."""
    from transformers.masking_utils import sdpa_mask

    with attending_with(model, NAME, partial(_attention, attend=attend), sdpa_mask):
        yield


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    attend: Attend | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if scaling is None:
        scale = query.shape[-1] ** -0.5
    else:
        scale = scaling
    prefill = query.shape[0] == 1 and query.shape[2] == key.shape[2] > 1
    window = kwargs.get("sliding_window")
    if prefill and attend and attention_mask is None:
        return attend(query, key, value, scale, int(module.layer_idx)).transpose(1, 2), None
    # Of a long prompt a window is a small part, which sdpa does not use; for one query it takes
    # several times as long.
    ours = (prefill and attend and window) or (
        query.shape[2] == 1 and (window or attention_mask is None)
    )
    if ours and kwargs.get("s_aux") is None and (prefill or kwargs.get("softcap") is None):
        if prefill:
            by = "auto"
        else:
            by = "kernel"
        softcap = kwargs.get("softcap")
        out = fastest_dense(query, key, value, scale=scale, softcap=softcap, window=window, by=by)
        return out.transpose(1, 2), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )[0], None


def top_k_attention(
    q: Tensor, k: Tensor, v: Tensor, *, density: float, tail: int, scale: float
) -> Tensor:
    """softmax over the top keys of each query, causal.

    Queries of a block of 64 have as many keys each: `density` of what its last one sees.

    Args:
        q: (1, H, Q, D).
        k, v: (1, G, Q, D).

    Returns:
        (1, H, Q, D) in q's dtype.
    """
    heads = q.shape[1]
    groups = k.shape[1]
    length = q.shape[2]
    out = torch.empty_like(q)
    for start in range(0, length, _BLOCK):
        stop = min(start + _BLOCK, length)
        part = q[0, :, start:stop].unflatten(0, (groups, -1)).flatten(1, 2)
        # (G, H / G, rows, keys): scores of the keys that any query of the block sees.
        scores = (
            (part.float() @ k[0, :, :stop].float().transpose(1, 2))
            .mul_(scale)
            .unflatten(1, (heads // groups, -1))
        )
        rows = torch.arange(start, stop, device=q.device)[:, None]
        ahead = rows < torch.arange(start, stop, device=q.device)
        scores[..., start:].masked_fill_(ahead, float("-inf"))
        count = math.ceil(density * stop)
        if start < length - tail and count < stop:
            least = _kth_largest(scores, count)
            least[..., max(0, length - tail - start) :, :] = float("-inf")
            scores.masked_fill_(scores < least, float("-inf"))
        weights = scores.softmax(-1).to(v.dtype).flatten(1, 2)
        out[0, :, start:stop] = (
            (weights @ v[0, :, :stop]).unflatten(1, (heads // groups, -1)).flatten(0, 1)
        )
    return out


def _kth_largest(scores: Tensor, count: int) -> Tensor:
    """The value of the last axis that `count` are no smaller than, the axis kept."""
    if scores.device.type != "cpu":
        return scores.topk(count, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    # numpy's selection is many times as fast as torch's on a CPU.
    at = scores.shape[-1] - count
    return torch.from_numpy(np.partition(scores.numpy(), at, axis=-1)[..., at : at + 1].copy())
