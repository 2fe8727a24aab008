"""Attention of a layer whose cache drops tokens by a policy.

Shapes: B batch, H query heads, G KV heads, Q query length, D head dim, E value dim.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from artifacts import HeadwiseError
from kernels import registry
from kernels.call import AttentionCall
from kernels.dense import dense_attention
from kernels.patterns import LayerPlan
from runtime.attention.context import is_long, kernel_for
from runtime.attention.state import Call, attempt
from runtime.autocast import without_autocast


def attend_evicting(call: Call, cache: Any) -> Tensor:
    """(B, Q, H, E) of a call over the tokens that its cache, a PolicyLayer, keeps and the new ones.

    Raises:
        HeadwiseError: no kernel computes the call, or its mask is not causal over contiguous
            tokens. Dropped tokens cannot be served densely instead.
    """
    why = _why_not(call, cache)
    if why is not None:
        raise HeadwiseError(f"a cache that drops tokens cannot serve this call: {why}")
    call.layer.count("kept")
    if call.scale is None:
        scale = call.query.shape[-1] ** -0.5
    else:
        scale = call.scale
    options: dict[str, Any] = {"scale": scale, "softcap": call.softcap}
    fresh = None if call.context is None else call.context.fresh
    with without_autocast(call.query.device):
        out: Tensor = cache.attend(
            call.query,
            fresh,
            **options,
            backend=call.layer.settings.backend,
            prefill=partial(_prefill, call, options),
        )
    # Some models view the result in another shape, as sdpa's is contiguous.
    return out.transpose(1, 2).contiguous()


def _prefill(
    call: Call,
    options: dict[str, Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: tuple[int, ...] | None = None,
) -> Tensor:
    """Attend to whole prompts for a policy: (B, H, Q, E), long ones by the layer's patterns.

    Args:
        q, k, v: of the policy's sequences and KV heads.
        heads: these, None for all of the layer.
    """
    layer = call.layer
    settings = layer.settings
    plan = layer.plan
    lengths = q.shape[2], k.shape[2]
    if plan is not None and is_long(*lengths, settings.dense_below, plan.dense_tail):
        kernel, no_kernel = kernel_for(settings.backend, q, k, v)
        if no_kernel is None:
            settings.check_length(k.shape[2])
            if heads is not None:
                plan = plan.select_kv_heads(heads)
            out = attempt(call, _by_patterns, plan, options, q, k, v, kernel)
            if isinstance(out, Tensor):
                layer.count("sparse")
                return out
    return dense_attention(q, k, v, **options, backend=settings.backend)[0]


def _by_patterns(
    call: Call,
    plan: LayerPlan,
    options: dict[str, Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: str,
) -> Tensor:
    """(B, H, Q, E) of prompts over the index of a plan."""
    index = plan.build(q, k, scale=options["scale"])
    out: Tensor = registry.run_by("attention", kernel, AttentionCall(q, k, v, index, **options))[0]
    return out


def _why_not(call: Call, cache: Any) -> str | None:
    """Reason why a cache that drops tokens cannot serve a call."""
    context = call.context
    reason = call.unsupported_reason
    if reason is not None:
        return reason
    if call.sinks is not None:
        return "the layer uses attention sinks"
    if call.mask is None:
        return None
    if context is None or context.fresh is None:
        return (
            "the mask is not causal over new tokens side by side (packed, "
            "overlaid, with holes, or made by hand)"
        )
    if context.held is not None and not cache.holds(context.held):
        return (
            "the attention mask leaves out tokens that the cache has taken "
            "in, or has ones that it has not"
        )
    return None
