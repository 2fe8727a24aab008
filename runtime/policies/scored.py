"""Attention that also adds up what each key got, from the same pass: no row of attention is ever made.

Shapes: B batch, H query heads, G KV heads, Q queries, K keys, D head dim, E value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.decode import MAX_QUERIES, decode_attention
from runtime.policies.base import Call


def attend_scored(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention of queries (B, H, Q, D), the last of keys (B, G, K, D): out (B, H, Q, E) and sums (B, G, K).

    A key's sum, fp32, is that of its probabilities in all queries of the query heads of its KV head.
    """
    how: dict[str, Any] = {"scale": call.scale, "softcap": call.softcap, "backend": call.backend}
    (batch, heads, q_len, _), k_len = q.shape, k.shape[2]
    if q_len <= MAX_QUERIES:
        done = decode_attention(q, k, v, scores="sum", **how)
        assert done.scores is not None
        return done.out, done.scores
    out = q.new_empty(batch, q_len, heads, v.shape[3]).transpose(1, 2)
    sums = torch.zeros(*k.shape[:3], dtype=torch.float32, device=k.device)
    for begin in range(0, q_len, MAX_QUERIES):
        end = min(begin + MAX_QUERIES, q_len)
        seen = k_len - q_len + end
        done = decode_attention(q[:, :, begin:end], k[:, :, :seen], v[:, :, :seen], scores="sum", **how)
        assert done.scores is not None
        out[:, :, begin:end] = done.out
        sums[:, :, :seen] += done.scores
    return out, sums
