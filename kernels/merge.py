"""Attention over a few keys, merged with attention over the rest: two parts of one softmax.

Shapes: B batch, H query heads, G KV heads, Q query length, s a few keys, D head dim, E value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.logits import Logits, wide


def merge_attention(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    logits: Logits,
    seen: Tensor | None,
) -> Tensor:
    """Merge attention over some keys, `out`, with attention over s more: (B, H, Q, E).

    Two parts of a softmax over disjoint keys add up, weighted by their log-sum-exp (Flash-Decoding;
    Dao et al.).

    Args:
        out: (B, H, Q, E), a learned sink included.
        lse: (B, H, Q) fp32, a learned sink included; a query that sees nothing there has -inf.
        q: (B, H, Q, D).
        k: (B, G, s, D); torch multiplies keys and values in fp32, so s should be small.
        v: (B, G, s, E).
        logits: of both parts.
        seen: (Q, s) bool, which of these keys a query sees; None for all of them.
    """
    k, v = (wide(x)[:, :, None] for x in (k, v))
    rest = logits.compute(q.unflatten(1, (k.shape[1], -1)), k, seen).flatten(1, 2)
    whole = torch.logaddexp(lse, rest.logsumexp(-1))
    weights = (rest - whole[..., None]).exp().unflatten(1, (k.shape[1], -1))
    return (out.float() * (lse - whole).exp()[..., None] + (weights @ v).flatten(1, 2)).to(
        out.dtype
    )
