"""Attention of a layer whose cache drops tokens by a policy.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from artifacts import HeadwiseError
from kernels import registry
from kernels.call import AttentionCall
from kernels.patterns import LayerPlan
from kernels.registry import NoKernelError
from runtime.attention.call import Call
from runtime.attention.context import is_long, kernel_for
from runtime.attention.failures import attempt
from runtime.attention.layer import Served
from runtime.autocast import without_autocast
from runtime.caches.step import Step, View
from runtime.lazy import NewTokens

NOT_OURS = "this cache is not one of new_cache(): it keeps every token, whatever kv_cache says"


def serve_evicting(call: Call) -> Served | None:
    """A call over the tokens that its cache, a PolicyLayer, keeps and the new ones.

    Padding gets zeros. A call with another cache is left to others.

    Raises:
        HeadwiseError: no kernel computes the call, or its mask is not causal over contiguous
            tokens. Dropped tokens cannot be served densely instead.
    """
    if not isinstance(call.key, NewTokens):
        if call.k_shape[2] != call.q_shape[2]:
            call.layer.settings.warn_once(NOT_OURS)
        return None
    cache = call.key.layer
    why = _why_not(call, cache)
    if why is not None:
        raise _refusal(why)
    try:
        return Served(_attend_parts(call, cache), "kept")
    except NoKernelError as error:
        raise _refusal(error) from error


def _refusal(why: object) -> HeadwiseError:
    return HeadwiseError(f"a cache that drops tokens cannot serve this call: {why}")


def _attend_parts(call: Call, cache: Any) -> Tensor:
    """(B, Q, H, E) of a call, part by part."""
    fresh = None if call.context is None else call.context.fresh
    logits = call.logits
    # What queries see is the policy's.
    if logits.window is not None:
        logits = replace(logits, window=None)
    backend = call.layer.settings.backend
    out: Tensor | None = None
    with without_autocast(call.query.device):
        for part in cache.begin(call.query, fresh, logits=logits, backend=backend):
            own = _attend(call, part)
            if part.rows is None and part.head_index is None:
                out = own
                continue
            if out is None:
                out = _zeros(call, own.dtype)
            part.write(out, own)
    cache.finish()
    if out is None:
        out = _zeros(call, call.query.dtype)
    # Some models view the result in another shape, as sdpa's is contiguous.
    return out.to(call.query.dtype).transpose(1, 2).contiguous()


def _zeros(call: Call, dtype: torch.dtype) -> Tensor:
    """Output (B, H, Q, E) of a call, a transposed view."""
    batch, heads, q_len, _ = call.q_shape
    out = call.query.new_zeros(batch, q_len, heads, call.value.shape[3], dtype=dtype)
    return out.transpose(1, 2)


def _attend(call: Call, part: Any) -> Tensor:
    """Attention (B, H, Q, E) of a part of the call, a Part; its policy then drops tokens."""
    policy = part.policy
    outs = []
    for step in policy.steps(part.step):
        view = policy.view(step)
        out = None
        scores = None
        if view.whole:
            out = _by_patterns(call, step, view, part.heads)
        if out is None:
            out, scores = view.attend(step)
        policy.update(step, scores)
        outs.append(out)
    if len(outs) == 1:
        return outs[0]
    return torch.cat(outs, dim=2)


def _by_patterns(
    call: Call, step: Step, view: View, heads: tuple[int, ...] | None
) -> Tensor | None:
    """Attention (B, H, Q, E) of whole texts by the layer's patterns, None if they do not serve.

    Args:
        call: the call.
        step: new tokens of some sequences and KV heads.
        view: what they see.
        heads: these KV heads, None for all of the layer.
    """
    q = step.q
    k = view.keys
    v = view.values
    layer = call.layer
    settings = layer.settings
    plan = layer.plan
    k_len = k.shape[2]
    if plan is None or not is_long(q.shape[2], k_len, settings.dense_below, plan.dense_tail):
        return None
    kernel, no_kernel = kernel_for(settings.backend, q, k, v)
    if no_kernel is not None:
        return None
    settings.check_length(k_len)
    if heads is not None:
        plan = plan.select_kv_heads(heads)
    out = attempt(call, _sparse, plan, step, view, kernel)
    if not isinstance(out, Tensor):
        return None
    layer.count("sparse")
    return out


def _sparse(_: Call, plan: LayerPlan, step: Step, view: View, kernel: str) -> Tensor:
    """(B, H, Q, E) of texts over the index of a plan."""
    index = plan.build(step.q, view.keys, scale=step.logits.factor(step.q.shape[3]))
    attention = AttentionCall(step.q, view.keys, view.values, index, logits=step.logits)
    out: Tensor = registry.run_by("attention", kernel, attention)[0]
    return out


def _why_not(call: Call, cache: Any) -> str | None:
    """Reason why a cache that drops tokens cannot serve a call."""
    context = call.context
    reason = call.unsupported_reason
    if reason is not None:
        return reason
    if call.logits.sinks is not None:
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
