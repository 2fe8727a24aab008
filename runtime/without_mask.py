"""Dense attention of many queries by Headwise's kernel: where it is faster, or torch's would need a mask of Q x K.

A layer that slides over a window is one: under such a mask torch computes every key, not the window's. With low_memory
it is every call whose mask or weights count as memory.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor

from kernels.patterns import Dense, LayerPlan
from kernels.ragged import Ragged
from runtime.calls import Call
from runtime.dense import faster, right
from runtime.head_groups import by_kv_heads
from runtime.masks import MIN_QUERIES, Layout, PrefillMask
from runtime.reasons import no_kernel, special
from runtime.sinks import attend_with_sinks


def attend_by_kernel(call: Call) -> tuple[Tensor, str | None] | None:
    """(B, Q, H, E) of a call of many queries by our kernel over every key, and what to count it as; None: not served.

    It serves where it is faster, or where dense attention would need a Q x K mask or weights that nobody wants.
    """
    layer, mask, more = call.layer, call.mask, call.more
    if layer is None or not isinstance(mask, PrefillMask) or mask.tokens.sequences is None:
        return None
    q, k, v, layout, settings = call.query, call.key, call.value, mask.tokens, layer.settings
    if (q.shape[0], q.shape[2], k.shape[2]) != (mask.shape[0], *mask.shape[2:]):
        return None
    if more.get("sliding_window") is not None and layout.window is None:
        return None
    how = _chosen(call, layout)
    if how is None:
        return None
    sinks = more.get("s_aux")
    plain = call._replace(more={**more, "sliding_window": None, "s_aux": None})
    ragged = _ragged(layout)
    if special(plain) or ragged is None or no_kernel(settings.backend, q, k, v) is not None:
        return None

    def attend(queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        plan = _dense_plan(queries.shape[1], keys.shape[1])
        index = plan.build(queries, keys, scale=call.scale, window=layout.window, ragged=ragged)
        how: dict[str, Any] = {"scale": call.scale, "softcap": call.softcap, "backend": settings.backend}
        return attend_with_sinks(queries, keys, values, index, sinks=sinks, **how)

    if not settings.low_memory:
        return attend(q, k, v, sinks).transpose(1, 2), how or None

    def attend_head(head: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return attend(queries, keys, values, None if sinks is None else sinks.view(k.shape[1], -1)[head])

    return by_kv_heads(attend_head, q, k, v).transpose(1, 2), how or None


def _chosen(call: Call, layout: Layout) -> str | None:
    """What a call that our kernel serves is counted as, "" for the reason why it is dense; None where it does not."""
    layer, q, k, v = call.layer, call.query, call.key, call.value
    assert layer is not None
    settings = layer.settings
    many = q.shape[2] >= MIN_QUERIES
    if layout.window is not None and settings.dense_kernels and many and right(q, k, v):
        return "window by kernel" if layer.plan is None else ""
    weights = settings.dense == "eager" or call.softcap is not None or call.more.get("s_aux") is not None
    # What else serves soft-caps and sinks writes down every weight.
    may = layout.window is None and settings.kernel_from is not None and k.shape[2] >= settings.kernel_from
    if may and (settings.dense_by == "kernel" or (right(q, k, v) if weights else faster(q, k, v) == "kernel")):
        return "dense by kernel"
    return "" if settings.low_memory and many and (weights or not _needs_no_mask(layout)) else None


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
def _dense_plan(heads: int, kv_heads: int) -> LayerPlan:
    """Every key for all query heads."""
    return LayerPlan([Dense()] * heads, kv_heads)
