"""Attention of one KV head and its query heads at a time, and dense attention by Headwise's kernels without any mask.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from torch import Tensor

from kernels.attention import sparse_attention
from kernels.patterns import Dense, LayerPlan
from kernels.ragged import Ragged
from runtime.calls import Call
from runtime.masks import MIN_QUERIES, Layout, PrefillMask
from runtime.reasons import no_kernel, special


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


def attend_without_mask(call: Call) -> Tensor | None:
    """(B, Q, H, E) of a long call that dense attention would need a Q x K mask for; None for any other."""
    layer, mask, window = call.layer, call.mask, call.more.get("sliding_window")
    if layer is None or not isinstance(mask, PrefillMask) or mask.tokens.ranges is None:
        return None
    q, k, v, layout, settings = call.query, call.key, call.value, mask.tokens, layer.settings
    if q.shape[2] < MIN_QUERIES or (q.shape[0], q.shape[2], k.shape[2]) != (mask.shape[0], *mask.shape[2:]):
        return None
    eager = settings.dense == "eager" or call.softcap is not None
    if (_needs_none(layout) and not eager) or special(call._replace(more={**call.more, "sliding_window": None})):
        return None
    if (window is not None and layout.window is None) or no_kernel(settings.backend, q, k, v) is not None:
        return None
    ragged = _ragged(layout)
    if ragged is None:
        return None

    def attend(_: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        plan = _dense_plan(queries.shape[1], 1)
        index = plan.build(queries, keys, scale=call.scale, window=layout.window, ragged=ragged)
        return sparse_attention(
            queries, keys, values, index, scale=call.scale, softcap=call.softcap, backend=settings.backend
        )

    return by_kv_heads(attend, q, k, v).transpose(1, 2)


def _needs_none(layout: Layout) -> bool:
    """Whether causal attention from the first key on is all that the mask says: sdpa does that without one."""
    whole = (0, layout.k_len)
    near = layout.window is None or layout.k_len <= layout.window
    return near and layout.q_len == layout.k_len and all(each == whole for each in layout.ranges or ())


def _ragged(layout: Layout) -> Ragged | None:
    """The sequences that have queries in the call; None where none has."""
    rows = [
        (row, max(start - layout.q_start, 0), end - max(start, layout.q_start), start, end - start)
        for row, (start, end) in enumerate(layout.ranges or ())
        if end > max(start, layout.q_start)
    ]
    if not rows:
        return None
    row, q_starts, q_lens, k_starts, k_lens = zip(*rows, strict=True)
    return Ragged(rows=row, q_starts=q_starts, q_lens=q_lens, k_starts=k_starts, k_lens=k_lens)


@lru_cache
def _dense_plan(heads: int, kv_heads: int) -> LayerPlan:
    return LayerPlan([Dense()] * heads, kv_heads)
