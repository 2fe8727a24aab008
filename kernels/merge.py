"""Attention over a few keys, merged with attention over the rest: two parts of one softmax.

Shapes: B batch, H query heads, G KV heads, Q query length, s a few keys, D head dim, E value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_attention(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    seen: Tensor | None,
    scale: float,
    softcap: float | None,
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
        seen: (Q, s) bool, which of these keys a query sees; None for all of them.
        scale: of the logits.
        softcap: as kernels.attention.sparse_attention has it.
    """
    k, v = (x.float()[:, :, None] for x in (k, v))
    logits = q.float().unflatten(1, (k.shape[1], -1)) @ k.transpose(3, 4) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if seen is not None:
        logits = logits.masked_fill(~seen, float("-inf"))
    logits = logits.flatten(1, 2)
    whole = torch.logaddexp(lse, logits.logsumexp(-1))
    weights = (logits - whole[..., None]).exp().unflatten(1, (k.shape[1], -1))
    return (out.float() * (lse - whole).exp()[..., None] + (weights @ v).flatten(1, 2)).to(
        out.dtype
    )
