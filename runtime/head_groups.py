"""Attention of one KV head and its query heads at a time.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def by_kv_heads(attend: Callable[[int, Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, H, Q, E) from attend(KV head, its queries, its keys, its values) of one KV head at a time.

    q (B, H, Q, D), k (B, G, K, D), v (B, G, K, E). An index, and what a kernel packs, is then of one KV head alone.
    """
    batch, heads, q_len, _ = q.shape
    group = heads // k.shape[1]
    out = q.new_empty(batch, q_len, heads, v.shape[-1]).transpose(1, 2)
    for head in range(k.shape[1]):
        mine, its = slice(head * group, (head + 1) * group), slice(head, head + 1)
        out[:, mine] = attend(head, q[:, mine], k[:, its], v[:, its])
    return out
