"""Attention of a layer whose cache is under policies: what the registered attention function does
with such a cache.

Shapes: B batch, H query heads, G KV heads, Q query length, D head dim, E value dim.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from artifacts import HeadwiseError
from kernels.dense import dense_attention
from runtime.attention.calls import Call
from runtime.attention.kernel import attend_layer
from runtime.attention.reasons import attempt, kernel_for
from runtime.attention.state import MIN_QUERIES


def attend_kept(call: Call, cache: Any) -> Tensor:
    """(B, Q, H, E) for a call's queries over what the layer's cache, a PolicyLayer, keeps and its
    new tokens.

    Raises:
        HeadwiseError: the call asks for what no kernel does, or for a mask that is not plainly
        causal: what was dropped
            cannot be attended to in any other way.
    """
    layer = call.layer
    tokens = call.tokens
    settings = layer.settings
    plan = layer.plan
    backend = layer.settings.backend
    why = call.special or (None if call.sinks is None else "the layer uses attention sinks")
    if why is None and not (call.mask is None or (tokens is not None and tokens.fresh is not None)):
        why = (
            "the mask is not causal over new tokens side by side (packed, "
            "overlaid, with holes, or made by hand)"
        )
    spans, held = (None, None) if tokens is None else (tokens.fresh, tokens.held)
    if why is None and held is not None and not cache.holds(held):
        why = (
            "the attention mask leaves out tokens that the cache has taken "
            "in, or has ones that it has not"
        )
    if why is not None:
        raise HeadwiseError(f"a cache that drops tokens cannot serve this call: {why}")
    layer.count("kept")
    scale = call.query.shape[-1] ** -0.5 if call.scale is None else call.scale
    how: dict[str, Any] = {"scale": scale, "softcap": call.softcap}

    def prefill(q: Tensor, k: Tensor, v: Tensor, heads: tuple[int, ...] | None = None) -> Tensor:
        """Of whole prompts (B, H, Q, E) in these KV heads, by the layer's patterns where they are
        long enough."""
        if plan is not None and k.shape[2] >= settings.dense_below and q.shape[2] >= MIN_QUERIES:
            verdict = kernel_for(backend, q, k, v)

            def by_patterns(_: Call) -> Tensor:
                return attend_layer(layer, plan, q, k, v, kv_heads=heads, verdict=verdict, **how)

            served = attempt(call, by_patterns) if verdict.why is None else None
            if isinstance(served, Tensor):
                layer.count("sparse")
                return served
        return dense_attention(q, k, v, backend=backend, **how)[0]

    out: Tensor = cache.attend(call.query, spans, **how, backend=backend, prefill=prefill)
    return out.transpose(1, 2)
