"""Attention of a layer whose cache is under policies: what the registered attention function does with such a cache.

Shapes: B batch, H query heads, G KV heads, Q query length, D head dim, E value dim.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from artifacts import HeadwiseError
from kernels import dispatch
from runtime.attention.calls import Call, no_kernel
from runtime.attention.kernel import attend_layer
from runtime.attention.reasons import attempt
from runtime.attention.state import MIN_QUERIES, Layer
from runtime.caches.step import attend_all


def attend_kept(call: Call, cache: Any) -> Tensor:
    """(B, Q, H, E) for a call's queries over what the layer's cache, a PolicyLayer, keeps and its new tokens.

    Raises:
        HeadwiseError: the call asks for what no kernel does, or for a mask that is not plainly causal: what was dropped
            cannot be attended to in any other way.
    """
    layer, q, mask = call.layer, call.query, call.mask
    assert layer is not None
    why = call.special or (None if call.sinks is None else "the layer uses attention sinks")
    if why is None and not (mask is None or (call.tokens is not None and call.tokens.fresh is not None)):
        why = "the mask is not causal over new tokens side by side (packed, overlaid, with holes, or made by hand)"
    spans, held = (None, None) if call.tokens is None else (call.tokens.fresh, call.tokens.held)
    if why is None and held is not None and not cache.holds(held):
        why = "the attention mask leaves out tokens that the cache has taken in, or has ones that it has not"
    if why is not None:
        raise HeadwiseError(f"a cache that drops tokens cannot serve this call: {why}")
    layer.count("kept")
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    prefill = partial(_prefill, layer, scale, call.softcap)
    how = {"scale": scale, "softcap": call.softcap, "backend": layer.settings.backend, "prefill": prefill}
    out: Tensor = cache.attend(q, spans, **how)
    return out.transpose(1, 2)


def _prefill(
    layer: Layer,
    scale: float,
    softcap: float | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: tuple[int, ...] | None = None,
) -> Tensor:
    """Attention of whole prompts (B, H, Q, E) in these KV heads, by the layer's patterns if they are long enough."""
    settings, plan, backend = layer.settings, layer.plan, layer.settings.backend
    how: dict[str, Any] = {"scale": scale, "softcap": softcap}
    long = plan is not None and k.shape[2] >= settings.dense_below and q.shape[2] >= MIN_QUERIES
    if long and no_kernel(backend, q, k, v) is None:
        kernel = dispatch.fastest(q, k, v) if backend == "auto" else backend
        served = attempt(layer, partial(attend_layer, layer, plan, q, k, v, kv_heads=heads, backend=kernel, **how))
        if isinstance(served, Tensor):
            layer.count("sparse")
            return served
    return attend_all(q, k, v, backend=backend, **how)[0]
