"""The attention function registered with transformers: decides for each call what serves it, and
serves it.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kernels.decode import MAX_QUERIES
from runtime.attention.calls import Call
from runtime.attention.kept import attend_kept
from runtime.attention.kernel import attend, attend_step
from runtime.attention.masks import headwise_mask, starts_of
from runtime.attention.own import attend_alone, attend_as_before, attend_dense
from runtime.attention.reasons import NOT_OURS, Verdict, attempt, too_few, verdict_of, why_dense
from runtime.attention.state import NOTHING, layer_of
from runtime.omnikv.bank import fetched
from runtime.standin import NewTokens

ATTENTION_NAME = "headwise"


def register() -> None:
    """Make the name known to transformers. Any number of times."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, headwise_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, headwise_mask)


def headwise_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer as transformers calls it.

    query (B, H, Q, D), key (B, G, K, D), value (B, G, K, E) -> (B, Q, H, E) and the weights where
    asked for."""
    layer = layer_of(module)
    call = Call(
        module, layer or NOTHING, query, key, value, attention_mask, dropout, scaling, kwargs
    )
    if torch.compiler.is_compiling():
        # A process that compiles nothing does without torch's compiler: seconds, and Triton.
        from runtime.attention.compiled import attend_traced

        return attend_traced(call)
    if layer is None:
        return attend_as_before(call)
    if isinstance(key, NewTokens):
        return attend_kept(call, key.layer), None
    if layer.settings.evicts and key.shape[2] != query.shape[2]:
        layer.settings.say(NOT_OURS)
    fault = None
    if layer.role is not None:
        chosen = attempt(call, _chosen)
        if isinstance(chosen, Tensor):
            return chosen.transpose(1, 2), None
        fault = chosen
        call = call.on(query, fetched(key), fetched(value), attention_mask)
    return (_step if query.shape[2] <= MAX_QUERIES else _prefill)(call, fault)


def _step(call: Call, fault: str | None) -> tuple[Tensor, Tensor | None]:
    """A few queries, as decode has them: every key by our kernel, or what the model had.

    fault: what went wrong with chosen tokens, None where nothing did.
    """
    done = attempt(call, attend_step)
    if isinstance(done, Tensor):
        call.layer.count("decode by kernel")
        return done, None
    call.layer.count(done or fault or too_few(call) or "short")
    return attend_as_before(call)


def _prefill(call: Call, fault: str | None) -> tuple[Tensor, Tensor | None]:
    """Many queries: the layer's patterns, every key or a window by our kernel, or what the model
    had."""
    verdict = verdict_of(call)
    why = fault or why_dense(call, verdict)
    if why is None:
        served = attempt(call, _by_patterns, verdict)
        if isinstance(served, Tensor):
            call.layer.count("sparse")
            return served, None
        why = served or "short"
    return attend_dense(call, why)


def _by_patterns(call: Call, verdict: Verdict) -> Tensor | None:
    """(B, Q, H, E): long sequences by the layer's patterns, others densely; None where none is
    long."""
    layer = call.layer
    layout = call.tokens
    assert layout is not None and layer.plan is not None
    long = layout.long(layer.settings.dense_below, layer.plan.dense_tail)
    if not long.parts:
        return None
    out = attend(call, long, layer.plan, verdict)
    for part in long.others:
        row, queries, _ = part.places
        out[row, queries] = attend_alone(call.part(part), verdict)
    return out


def _chosen(call: Call) -> Tensor | None:
    """(B, H, Q, E) by the decode section of the artifact; None where that does not serve the
    call."""
    query = call.query
    key = call.key
    value = call.value
    layer = call.layer
    decode = layer.settings.decode
    role = layer.role
    number = layer.number
    assert decode is not None and role is not None
    starts = starts_of(call.mask)
    if (
        isinstance(starts, str)
        or call.sinks is not None
        or call.window is not None
        or call.special is not None
    ):
        return None
    how: dict[str, Any] = {"starts": starts, "scale": call.scale, "softcap": call.softcap}
    if decode.serves(query, key):
        out = decode.attend(number, role, query, key, value, **how)
        if out is not None:
            layer.count("chosen")
        return out
    if query.shape[2] > 1:
        decode.after_prefill(role, query, key, **how)
    if (
        call.tokens is None
        or call.tokens.ranges is None
        or (verdict := verdict_of(call)).why is not None
    ):
        return None
    firsts = [start for start, _ in call.tokens.ranges]
    out = decode.attend_chunk(
        number, role, query, key, value, firsts, backend=verdict.kernel, **how
    )
    if out is not None:
        layer.count("sparse")
    return out
