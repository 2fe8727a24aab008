"""Attention by its definition, in fp64: what all measurements inside a model are compared with.

Shapes: H query heads, G KV heads, S tokens, D head dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kernels.logits import Logits
from profiling.inside.capture import LayerInputs


def random_inputs(
    length: int, *, heads: int = 4, seed: int = 0, scale: float = 0.3, **more: Any
) -> LayerInputs:
    """A layer of two KV heads with normal queries, keys and values of 16 numbers."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, n, length, 16, generator=generator) for n in (heads, 2, 2))
    window = more.pop("sliding_window", None)
    logits = Logits(scale=scale, **more)
    return LayerInputs(layer=0, q=q, k=k, v=v, logits=logits, sliding_window=window)


def causal(length: int, window: int | None = None) -> Tensor:
    """(S, S) True where a query sees a key."""
    behind = torch.arange(length)[:, None] - torch.arange(length)
    return (behind >= 0) & (behind < (window or math.inf))


def weights(x: LayerInputs, mask: Tensor | None = None) -> Tensor:
    """(H, S, S) attention weights on the keys of a mask; a sink takes its share and is no key."""
    heads, length = x.q.shape[1:3]
    keys = x.k[0].double().repeat_interleave(heads // x.k.shape[1], 0)
    scores = x.q[0].double() @ keys.transpose(1, 2) * x.scale
    softcap = x.logits.softcap
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    seen = causal(length, x.sliding_window)
    scores = scores.masked_fill(~(seen if mask is None else seen & mask), -math.inf)
    sinks = x.logits.sinks
    if sinks is not None:
        sinks = sinks.double().view(-1, 1, 1).expand(-1, length, 1)
        scores = torch.cat([scores, sinks], -1)
    return scores.softmax(-1)[..., :length]


def output(x: LayerInputs, mask: Tensor | None = None) -> Tensor:
    """(H, S, D) attention."""
    values = x.v[0].double().repeat_interleave(x.q.shape[1] // x.v.shape[1], 0)
    return weights(x, mask) @ values
