"""Attention that adds up each key's probabilities in plain fp32 torch, a few queries at a time.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.decode import reference
from kernels.decode.reference import supports

__all__ = ["scored_attention", "supports"]

# Queries whose rows of attention exist at a time.
_QUERIES = 64


def scored_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See kernels.scored.scored_attention; any number of queries."""
    q_len, k_len = q.shape[2], k.shape[2]
    how: dict[str, Any] = dict.fromkeys(("tokens", "starts", "ends", "window", "block_table"))
    how |= {"scale": scale, "softcap": softcap, "scores": "sum"}
    outs, sums, scores = [], [], torch.zeros(k.shape[:3], device=k.device)
    for begin in range(0, q_len, _QUERIES):
        end = min(begin + _QUERIES, q_len)
        seen = k_len - q_len + end
        some = (q[:, :, begin:end], k[:, :, :seen], v[:, :, :seen])
        out, lse, mass = reference.decode_attention(*some, **how)
        assert mass is not None
        outs.append(out.transpose(1, 2))
        sums.append(lse)
        scores = scores + torch.nn.functional.pad(mass, (0, k_len - seen))
    return torch.cat(outs, dim=1).transpose(1, 2), torch.cat(sums, dim=2), scores
