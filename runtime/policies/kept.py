"""Attention of a layer whose cache is under policies: what the registered attention function does with such a cache.

Shapes: B batch, H query heads, G KV heads, Q query length, D head dim, E value dim.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from artifacts import HeadwiseError
from runtime.masks import MIN_QUERIES, PrefillMask
from runtime.policies.base import Call, attend_all
from runtime.sparse import attend_by_patterns
from runtime.state import Layer

if TYPE_CHECKING:
    from runtime.policies.layer import PolicyLayer


def attend_kept(
    layer: Layer,
    q: Tensor,
    cache: PolicyLayer,
    mask: Tensor | None,
    scale: float | None,
    softcap: float | None,
    special: str | None,
) -> Tensor:
    """(B, Q, H, E) for queries (B, H, Q, D) over what the layer's cache keeps and its new tokens.

    Raises:
        HeadwiseError: the call asks for what no kernel does (`special`), or for a mask that is not plainly causal: what
            was dropped cannot be attended to in any other way.
    """
    if special is None and not (mask is None or (isinstance(mask, PrefillMask) and mask.tokens.fresh is not None)):
        special = "the mask is not causal over new tokens side by side (packed, overlaid, with holes, or made by hand)"
    if special is not None:
        raise HeadwiseError(f"a cache that drops tokens cannot serve this call: {special}")
    layer.count("kept")
    spans = mask.tokens.fresh if isinstance(mask, PrefillMask) else None
    call = partial(_call, layer, q.shape[-1] ** -0.5 if scale is None else scale, softcap)
    return cache.attend(q, spans, call).transpose(1, 2)


def _call(
    layer: Layer,
    scale: float,
    softcap: float | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: tuple[int, ...] | None,
) -> Call:
    prefill = partial(_prefill, layer, heads, scale, softcap)
    return Call(q=q, k=k, v=v, scale=scale, softcap=softcap, backend=layer.settings.backend, prefill=prefill)


def _prefill(
    layer: Layer,
    heads: tuple[int, ...] | None,
    scale: float,
    softcap: float | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """Attention of whole prompts (B, H, Q, E) in these KV heads, by the layer's patterns if they are long enough."""
    settings, plan = layer.settings, layer.plan
    if plan is None or k.shape[2] < settings.dense_below or q.shape[2] < MIN_QUERIES:
        return attend_all(q, k, v, scale=scale, softcap=softcap, backend=settings.backend)[0]
    layer.count("sparse")
    return attend_by_patterns(layer, q, k, v, scale=scale, softcap=softcap, kv_heads=heads)
