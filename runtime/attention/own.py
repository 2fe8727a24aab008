"""Dense attention of a call: by our kernel where that serves it and is the faster, else as the
model had it before.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kernels.decode import MAX_QUERIES
from runtime.attention.calls import Call
from runtime.attention.kernel import attend
from runtime.attention.layout import Launch, Layout
from runtime.attention.masks import PrefillMask
from runtime.attention.reasons import Verdict, attempt, verdict_of
from runtime.attention.state import MIN_QUERIES
from runtime.dense import faster
from runtime.layers import eager_attention


def attend_dense(call: Call, why: str) -> tuple[Tensor, Tensor | None]:
    """What is not sparse, for this reason: (B, Q, H, E), and the weights where they were asked for.
    It is counted."""
    verdict = verdict_of(call)
    how = _how(call, call.tokens, verdict)
    if how is not None:
        dense = attempt(call, every_key, verdict)
        if isinstance(dense, Tensor):
            call.layer.count(how or why)
            return dense, None
        why = dense
    call.layer.count(why)
    return attend_as_before(call)


def every_key(call: Call, verdict: Verdict) -> Tensor:
    """(B, Q, H, E) by our kernel over every key, or those of the layer's window."""
    layout = call.tokens
    assert layout is not None
    return attend(call, layout.together, None, verdict, window=layout.window)


def attend_alone(call: Call, verdict: Verdict) -> Tensor:
    """(1, Q, H, E) of one sequence whose queries are the last of its keys, the faster way; its mask
    is not read."""
    q_len = call.query.shape[2]
    k_len = call.key.shape[2]
    if _how(call, Layout(k_len - q_len, q_len, k_len, ((0, k_len),)), verdict) is None:
        return attend_alone_as_before(call)
    # A few queries are decode's, which has kernels of its own.
    served = Verdict(call.layer.settings.backend) if q_len <= MAX_QUERIES else verdict
    return attend(call, Launch(), None, served)


def _how(call: Call, layout: Layout | None, verdict: Verdict) -> str | None:
    """What a dense call that our kernel serves is counted as, "" for why it is dense; None where it
    does not serve."""
    if verdict.why is not None or layout is None or not layout.parts:
        return None
    if call.window is not None and layout.window is None:
        return None
    q = call.query
    k = call.key
    v = call.value
    settings = call.layer.settings
    many = q.shape[2] >= MIN_QUERIES
    if layout.window is not None and settings.dense_kernels and many:
        return "window by kernel" if call.layer.plan is None else ""
    weights = settings.dense == "eager" or call.softcap is not None or call.sinks is not None
    # What else serves soft-caps and sinks writes down every weight.
    may = (
        layout.window is None
        and settings.kernel_from is not None
        and k.shape[2] >= settings.kernel_from
    )
    if may and (settings.dense_by == "kernel" or weights or faster(q, k, v) == "kernel"):
        return "dense by kernel"
    return None


def attend_as_before(call: Call) -> tuple[Tensor, Tensor | None]:
    """The call by sdpa, or eager where the model used that: (B, Q, H, E), and the weights where
    they were asked for."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    module = call.module
    layer = call.layer
    q = call.query
    k = call.key
    v = call.value
    mask = call.mask
    how = {"dropout": call.dropout, "scaling": call.scale, **call.more}
    name = layer.settings.dense
    plain = mask.for_dense() if isinstance(mask, PrefillMask) else mask
    result: tuple[Tensor, Tensor | None]
    # sdpa returns no weights, refuses a soft-cap and silently forgets attention sinks.
    needs_eager = (
        name == "eager" or call.softcap is not None or call.sinks is not None or call.wants_weights
    )
    eager = eager_attention(module) if needs_eager else None
    if eager is None:
        result = ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, plain, **how)
        return result
    plain = mask.read() if isinstance(mask, PrefillMask) else mask
    if plain is None and q.shape[2] > 1 and call.causal:
        # sdpa's meaning of no mask: queries start at the first key.
        plain = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()[
            None, None
        ]
    if plain is not None and plain.dtype == torch.bool:
        zero = torch.zeros((), dtype=q.dtype, device=q.device)
        plain = torch.where(plain, zero, torch.finfo(q.dtype).min)
    result = eager(module, q, k, v, plain, **how)
    return result


def attend_alone_as_before(call: Call) -> Tensor:
    """(1, Q, H, E) of one sequence whose queries are the last of its keys, as the model would have
    had it served.

    The call is without a mask, as Call.part gives it.
    """
    return attend_as_before(replace(call, mask=_causal_mask(call.query, call.key, call.window)))[0]


def _causal_mask(q: Tensor, k: Tensor, window: int | None) -> Tensor | None:
    """(1, 1, Q, K) for queries that are the last Q of the keys; None where sdpa does without."""
    q_len = q.shape[2]
    k_len = k.shape[2]
    near = window is None or k_len <= window
    if near and q_len in (1, k_len):
        return None
    seen = torch.ones(q_len, k_len, dtype=torch.bool, device=q.device).tril(k_len - q_len)
    return (seen if near or window is None else seen.triu(k_len - q_len - window + 1))[None, None]
