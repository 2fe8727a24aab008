"""Serves a prefill by the patterns of its layer: whole batches, and padded ones sequence by sequence.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from kernels.ragged import Ragged
from runtime.calls import Call
from runtime.head_groups import by_kv_heads
from runtime.masks import MIN_QUERIES, Layout, PrefillMask
from runtime.own import attend_densely, causal_mask
from runtime.sinks import attend_with_sinks
from runtime.state import Layer


def attend_sparsely(call: Call) -> Tensor:
    """(B, Q, H, E): all long sequences in one launch, short ones densely, zeros for padded queries."""
    layer, mask = call.layer, call.mask
    assert layer is not None and isinstance(mask, PrefillMask)
    query, key, value = call.query, call.key, call.value
    batch, _, q_len, _ = query.shape
    parts = _parts(mask.tokens)
    long = [part for part in parts if part.k_len >= layer.settings.dense_below and part.q_len >= MIN_QUERIES]
    if len(long) == batch and {(part.k_start, part.q_len) for part in long} == {(long[0].k_start, q_len)}:
        keys = slice(long[0].k_start, long[0].k_start + long[0].k_len)
        return _attend(call, query, key[:, :, keys], value[:, :, keys], None).transpose(1, 2)
    if long:
        ragged = Ragged(
            rows=tuple(part.row for part in long),
            q_starts=tuple(part.q_start for part in long),
            q_lens=tuple(part.q_len for part in long),
            k_starts=tuple(part.k_start for part in long),
            k_lens=tuple(part.k_len for part in long),
        )
        out = _attend(call, query, key, value, ragged).transpose(1, 2)
    else:
        out = query.new_zeros(batch, q_len, query.shape[1], value.shape[-1])
    for part in parts:
        if part not in long:
            one = slice(part.row, part.row + 1)
            queries = slice(part.q_start, part.q_start + part.q_len)
            keys = slice(part.k_start, part.k_start + part.k_len)
            q, k, v = query[one, :, queries], key[one, :, keys], value[one, :, keys]
            out[one, queries] = attend_densely(call._replace(query=q, key=k, value=v, mask=causal_mask(q, k)))[0]
    return out


def _attend(call: Call, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged | None) -> Tensor:
    assert call.layer is not None
    how: dict[str, Any] = {"scale": call.scale, "softcap": call.softcap, "sinks": call.more.get("s_aux")}
    return attend_by_patterns(call.layer, q, k, v, ragged=ragged, **how)


def attend_by_patterns(
    layer: Layer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None = None,
    ragged: Ragged | None = None,
    kv_heads: tuple[int, ...] | None = None,
) -> Tensor:
    """(B, H, Q, E) of sequences that are all long: the index of every head, and attention over it.

    sinks: see runtime.sinks, (H,). kv_heads: those of the layer's that k and v hold, with the query heads that read
    them in q; None for all.
    """
    plan, settings = layer.plan, layer.settings
    assert plan is not None
    if settings.low_memory and k.shape[1] > 1:
        heads = range(k.shape[1]) if kv_heads is None else kv_heads

        def attend(head: int, *qkv: Tensor) -> Tensor:
            mine = None if sinks is None else sinks.view(k.shape[1], -1)[head]
            how: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": mine}
            return attend_by_patterns(layer, *qkv, ragged=ragged, kv_heads=(heads[head],), **how)

        return by_kv_heads(attend, q, k, v)
    if settings.watch is not None:
        return settings.watch.attend(layer, kv_heads, q, k, v, scale=scale, softcap=softcap, sinks=sinks, ragged=ragged)
    some = plan if kv_heads is None else plan.of(kv_heads)
    index = some.build(q, k, scale=scale, ragged=ragged)
    return attend_with_sinks(q, k, v, index, sinks=sinks, scale=scale, softcap=softcap, backend=settings.backend)


class _Part(NamedTuple):
    """One sequence of a call: slots [k_start, end) of the cache, of which those from `first_query` on ask."""

    row: int
    k_start: int
    end: int
    first_query: int

    @property
    def k_len(self) -> int:
        return self.end - self.k_start

    @property
    def q_len(self) -> int:
        return self.end - max(self.k_start, self.first_query)

    @property
    def q_start(self) -> int:
        return max(self.k_start - self.first_query, 0)


def _parts(layout: Layout) -> list[_Part]:
    """The sequences of a call that have queries in it."""
    parts = [_Part(row, start, end, layout.q_start) for row, start, end in layout.sequences or ()]
    return [part for part in parts if part.q_len > 0]
