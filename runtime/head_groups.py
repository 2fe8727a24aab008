"""Attention of one KV head and its query heads at a time, and dense attention by Headwise's kernels without any mask.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor

from kernels.patterns import Dense, LayerPlan
from kernels.ragged import Ragged
from runtime.calls import Call
from runtime.masks import MIN_QUERIES, Layout, PrefillMask
from runtime.reasons import no_kernel, special
from runtime.sinks import attend_with_sinks


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
    """(B, Q, H, E) of a long call that dense attention would need a Q x K mask or weights for; None for any other."""
    layer, mask, more = call.layer, call.mask, call.more
    if layer is None or not isinstance(mask, PrefillMask) or mask.tokens.sequences is None:
        return None
    q, k, v, layout, settings = call.query, call.key, call.value, mask.tokens, layer.settings
    if q.shape[2] < MIN_QUERIES or (q.shape[0], q.shape[2], k.shape[2]) != (mask.shape[0], *mask.shape[2:]):
        return None
    sinks = more.get("s_aux")
    weights = settings.dense == "eager" or call.softcap is not None or sinks is not None
    if (_needs_no_mask(layout) and not weights) or (more.get("sliding_window") is not None and layout.window is None):
        return None
    plain = call._replace(more={**more, "sliding_window": None, "s_aux": None})
    ragged = _ragged(layout)
    if special(plain) or ragged is None or no_kernel(settings.backend, q, k, v) is not None:
        return None

    def attend(head: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        plan = _dense_plan(queries.shape[1])
        index = plan.build(queries, keys, scale=call.scale, window=layout.window, ragged=ragged)
        mine = None if sinks is None else sinks.view(k.shape[1], -1)[head]
        how: dict[str, Any] = {"scale": call.scale, "softcap": call.softcap, "backend": settings.backend}
        return attend_with_sinks(queries, keys, values, index, sinks=mine, **how)

    return by_kv_heads(attend, q, k, v).transpose(1, 2)


def _needs_no_mask(layout: Layout) -> bool:
    """Whether causal attention from the first key on is all that the mask says: sdpa does that without one."""
    near = layout.window is None or layout.k_len <= layout.window
    whole = all((start, end) == (0, layout.k_len) for _, start, end in layout.sequences or ())
    return near and whole and layout.q_len == layout.k_len


def _ragged(layout: Layout) -> Ragged | None:
    """The sequences that have queries in the call; None where none has."""
    rows = [
        (row, max(start - layout.q_start, 0), end - max(start, layout.q_start), start, end - start)
        for row, start, end in layout.sequences or ()
        if end > max(start, layout.q_start)
    ]
    if not rows:
        return None
    row, q_starts, q_lens, k_starts, k_lens = zip(*rows, strict=True)
    return Ragged(rows=row, q_starts=q_starts, q_lens=q_lens, k_starts=k_starts, k_lens=k_lens)


@lru_cache
def _dense_plan(heads: int) -> LayerPlan:
    """Every key for the query heads of one KV head."""
    return LayerPlan([Dense()] * heads, 1)
