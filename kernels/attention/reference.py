"""Sparse attention in plain fp32 torch, row of tiles by row of tiles: slow, obvious, and the only oracle.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.index import TILE, SparseIndex


def supports(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why this backend cannot serve the call; None where it can. It always can."""
    return None


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, index: SparseIndex, *, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """See kernels.attention.sparse_attention. Returns out (B, H, Q, E) in q's dtype and lse (B, H, Q) fp32."""
    batch, num_heads, q_len, _ = q.shape
    group, k_len, offset = num_heads // k.shape[1], k.shape[2], k.shape[2] - q_len
    out = torch.empty(batch, q_len, num_heads, v.shape[-1], dtype=q.dtype, device=q.device).transpose(1, 2)
    lse = torch.empty(batch, num_heads, q_len, dtype=torch.float32, device=q.device)
    positions = torch.arange(k_len, device=q.device)
    for b in range(batch):
        for head in range(num_heads):
            diagonals, tiles, columns = index.diagonals[b, head], index.tiles[b, head], index.columns[b, head]
            for row in range(index.num_rows):
                at = index.first_row + row
                first, last = max(at * TILE, offset), min((at + 1) * TILE, k_len)
                computed = torch.cat([at - diagonals, tiles[row]])
                computed = computed[(computed >= 0) & (computed <= at)]
                seen = torch.isin(positions // TILE, computed) | torch.isin(positions, columns)
                keys = positions[seen & (positions < last)]
                queries = slice(first - offset, last - offset)
                logits = q[b, head, queries].float() @ k[b, head // group, keys].float().T * scale
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                logits = logits.masked_fill(keys > positions[first:last, None], float("-inf"))
                lse[b, head, queries] = logits.logsumexp(-1)
                out[b, head, queries] = (logits.softmax(-1) @ v[b, head // group, keys].float()).to(q.dtype)
    return out, lse
