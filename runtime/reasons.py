"""Why a call is not served sparsely, in words that go into the log, into stats() and into docs/runtime.md."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import dispatch
from runtime.calls import Call
from runtime.masks import MIN_QUERIES, PrefillMask

SLIDES = "the layer slides, and the artifact has patterns for it"


def why_dense(call: Call) -> str | None:
    """Why the call is not sparse, None where it is; refuses what should have been sparse and cannot."""
    layer, query, key, mask = call.layer, call.query, call.key, call.mask
    assert layer is not None
    if query.shape[2] == 1:
        return "decode"
    if layer.plan is None:
        return "layer left alone"
    settings = layer.settings
    if query.shape[2] < MIN_QUERIES or key.shape[2] < settings.dense_below:
        return "short"
    if isinstance(mask, PrefillMask) and mask.tokens.longest < settings.dense_below:
        return "short"
    reason = _unexpected(call)
    if reason is not None:
        settings.refuse(reason)
    return reason


def _unexpected(call: Call) -> str | None:
    layer, query, key, mask = call.layer, call.query, call.key, call.mask
    assert layer is not None and layer.plan is not None
    if reason := special(call._replace(more={**call.more, "s_aux": None})):
        return reason
    if not isinstance(mask, PrefillMask) or mask.tokens.sequences is None:
        return "the mask is not causal over contiguous tokens (overlaid, with holes, or made by hand)"
    if mask.tokens.window is not None:
        return SLIDES
    lengths = call.more.get("cu_seq_lens_q")
    if lengths is not None and lengths.numel() > 2 and mask.tokens.packed is None:
        return "sequences are packed by cu_seq_lens alone (give position_ids that restart, and use_cache=False)"
    batch, _, q_len, k_len = mask.shape
    if (query.shape[0], query.shape[2], key.shape[2]) != (batch, q_len, k_len):
        return "the cache holds other keys than the mask is for"
    heads = (len(layer.plan.patterns), layer.plan.num_kv_heads)
    if (query.shape[1], key.shape[1]) != heads:
        found = (query.shape[1], key.shape[1])
        return f"the layer has {found} query and KV heads, the plan is for {heads}"
    return no_kernel(layer.settings.backend, query, key, call.value)


def special(call: Call) -> str | None:
    """What a call asks for that no kernel of ours does, None where it is plain causal attention."""
    query, key, value, more = call.query, call.key, call.value, call.more
    if not call.causal:
        return "attention is not causal"
    if call.wants_weights:
        return "attention weights were asked for"
    if call.dropout:
        return "attention dropout is on (the model is in training mode)"
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return "gradients are required (use torch.no_grad or inference_mode)"
    for name, what in (("s_aux", "attention sinks"), ("position_bias", "a position bias")):
        if more.get(name) is not None:
            return f"the layer uses {what}"
    if more.get("sliding_window") is not None:
        return SLIDES
    if not query.dtype == key.dtype == value.dtype:
        return f"queries, keys and values differ in type: {query.dtype}, {key.dtype}, {value.dtype}"
    return None


def no_kernel(backend: str, query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why no kernel serves the call. The reference always does, slower than dense: only where asked for."""
    if backend != "auto":
        reason = dispatch.backend(backend).supports(query, key, value)
        return reason and f"kernel {backend}: {reason}"
    reasons = dispatch.why_not(query, key, value)
    fast = {name: reason for name, reason in reasons.items() if name != "reference"}
    if None in fast.values():
        return None
    return "no fast kernel: " + "; ".join(f"{name}: {reason}" for name, reason in fast.items())
