"""The attention function registered with transformers: decides for each call what serves it, and serves it.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from artifacts import HeadwiseError
from kernels.decode import MAX_QUERIES
from runtime.attention.calls import Call, no_kernel, special
from runtime.attention.kernel import attend, attend_step
from runtime.attention.layout import MIN_QUERIES, Layout
from runtime.attention.masks import PrefillMask, headwise_mask, starts_of
from runtime.attention.own import attend_densely, causal_mask
from runtime.attention.paged import PAGED_NAME, attend_paged
from runtime.attention.reasons import fault, message, why_dense
from runtime.attention.state import Layer, layer_of
from runtime.caches.kept import attend_kept
from runtime.caches.standin import NewTokens
from runtime.dense import faster, right
from runtime.low_memory.attention import tape_of
from runtime.omnikv.offload import on_device

ATTENTION_NAME = "headwise"
_Served = TypeVar("_Served")


def register() -> None:
    """Make the name known to transformers. Any number of times."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in (ATTENTION_NAME, PAGED_NAME):
        AttentionInterface.register(name, headwise_attention)
        AttentionMaskInterface.register(name, headwise_mask)


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

    query (B, H, Q, D), key (B, G, K, D), value (B, G, K, E) -> (B, Q, H, E) and the weights where asked for.
    """
    layer = layer_of(module)
    if layer is not None and layer.settings.low_memory and (tape := tape_of(module)) is not None:
        asked = {"dropout": dropout, "scaling": scaling, **kwargs}
        return tape.attend(query, key, value, attention_mask, asked)
    call = Call(module, layer, query, key, value, attention_mask, dropout, scaling, kwargs)
    if torch.compiler.is_compiling():
        # A process that compiles nothing does without torch's compiler: seconds, and Triton.
        from runtime.attention.compiled import attend_traced

        return attend_traced(call)
    if layer is None:
        return attend_densely(call)
    if isinstance(key, NewTokens):
        return attend_kept(call, key.layer), None
    if "cu_seq_lens_k" in kwargs and kwargs.get("cache") is not None:
        return attend_paged(call, layer), None
    if layer.settings.evicts and key.shape[2] != query.shape[2]:
        layer.settings.say("this cache is not one of new_cache(): it keeps every token, whatever kv_cache says")
    return _step(call, layer) if query.shape[2] <= MAX_QUERIES else _prefill(call, layer)


def _step(call: Call, layer: Layer) -> tuple[Tensor, Tensor | None]:
    """A few queries, as decode has them: chosen tokens, every key by our kernel, or what the model had."""
    chosen = None if layer.role is None else _attempt(_chosen, call, layer)
    if isinstance(chosen, Tensor):
        return chosen.transpose(1, 2), None
    if layer.role is not None:
        call = call._replace(key=on_device(call.key), value=on_device(call.value))
    done = _attempt(attend_step, call, layer)
    if isinstance(done, Tensor):
        layer.count("decode by kernel")
        return done, None
    layer.count(done or chosen or why_dense(call) or "short")
    return attend_densely(call)


def _prefill(call: Call, layer: Layer) -> tuple[Tensor, Tensor | None]:
    """Many queries: chosen tokens of the past, the layer's patterns, every key or a window, or what the model had."""
    chosen = None if layer.role is None else _attempt(_chosen, call, layer)
    if isinstance(chosen, Tensor):
        return chosen.transpose(1, 2), None
    if layer.role is not None:
        call = call._replace(key=on_device(call.key), value=on_device(call.value))
    why = chosen or why_dense(call)
    if why is None:
        served = _attempt(_sparse, call, layer)
        if isinstance(served, Tensor):
            layer.count("sparse")
            return served, None
        why = served or "short"
    how = _dense_by_kernel(call, layer)
    if how is not None:
        dense = _attempt(_every_key, call, layer)
        if isinstance(dense, Tensor):
            layer.count(how or why)
            return dense, None
        why = dense or why
    layer.count(why)
    return attend_densely(call)


def _attempt(serve: Callable[[Call, Layer], _Served], call: Call, layer: Layer) -> _Served | str:
    """What a kernel of ours gives, or in words what went wrong inside it; strict applications raise that."""
    try:
        return serve(call, layer)
    except HeadwiseError:
        raise
    except Exception as error:
        why = fault(error)
        if why is None:
            raise
        layer.settings.refuse(why, message(error))
    # Out here the error and all that its frames held are gone: dense attention has their memory.
    return why


def _sparse(call: Call, layer: Layer) -> Tensor:
    """(B, Q, H, E): all long sequences in one launch, short ones densely, zeros for padded queries."""
    assert isinstance(call.mask, PrefillMask)
    query, key, value = call.query, call.key, call.value
    long, short = call.mask.tokens.split(layer.settings.dense_below)
    if long is not None:
        out = attend(call, long, layer.plan)
    else:
        out = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
    for part in short:
        one, queries, keys = slice(part.row, part.row + 1), slice(part.q_start, part.q_start + part.q_len), part.keys
        alone = call._replace(query=query[one, :, queries], key=key[one, :, keys], value=value[one, :, keys])
        layout = Layout(part.k_len - part.q_len, part.q_len, part.k_len, ((0, part.k_len),))
        if _dense_how(alone, layer, layout):
            assert layout.together is not None
            out[one, queries] = attend(alone, layout.together, None)
        else:
            out[one, queries] = attend_densely(alone._replace(mask=causal_mask(alone.query, alone.key)))[0]
    return out


def _every_key(call: Call, layer: Layer) -> Tensor | None:
    """(B, Q, H, E) by our kernel over every key, or those of the layer's window."""
    assert isinstance(call.mask, PrefillMask)
    together = call.mask.tokens.together
    return None if together is None else attend(call, together, None, window=call.mask.tokens.window)


def _dense_by_kernel(call: Call, layer: Layer) -> str | None:
    """What a dense call that our kernel serves is counted as, "" for why it is dense; None where it does not serve."""
    q, k, mask = call.query, call.key, call.mask
    if not isinstance(mask, PrefillMask) or mask.tokens.sequences is None:
        return None
    if (q.shape[0], q.shape[2], k.shape[2]) != (mask.shape[0], *mask.shape[2:]):
        return None
    how = None if call.window is not None and mask.tokens.window is None else _dense_how(call, layer, mask.tokens)
    if how is None or special(call) is not None or no_kernel(layer.settings.backend, q, k, call.value) is not None:
        return None
    return how


def _dense_how(call: Call, layer: Layer, layout: Layout) -> str | None:
    q, k, v, settings = call.query, call.key, call.value, layer.settings
    many = q.shape[2] >= MIN_QUERIES
    if layout.window is not None and settings.dense_kernels and many and right(q, k, v):
        return "window by kernel" if layer.plan is None else ""
    weights = settings.dense == "eager" or call.softcap is not None or call.sinks is not None
    # What else serves soft-caps and sinks writes down every weight.
    may = layout.window is None and settings.kernel_from is not None and k.shape[2] >= settings.kernel_from
    if may and (settings.dense_by == "kernel" or (right(q, k, v) if weights else faster(q, k, v) == "kernel")):
        return "dense by kernel"
    needs_mask = settings.low_memory and many and (weights or not layout.needs_no_mask)
    return "" if needs_mask and right(q, k, v) else None


def _chosen(call: Call, layer: Layer) -> Tensor | None:
    """(B, H, Q, E) by the decode section of the artifact; None where that does not serve the call."""
    query, key, value, mask = call.query, call.key, call.value, call.mask
    settings, role, number = layer.settings, layer.role, layer.number
    decode = settings.decode
    assert decode is not None and role is not None
    starts = starts_of(mask)
    if isinstance(starts, str) or call.sinks is not None or call.window is not None or special(call) is not None:
        return None
    how: dict[str, Any] = {"starts": starts, "scale": call.scale, "softcap": call.softcap}
    if decode.serves(query, key):
        out = decode.attend(number, role, query, key, value, **how)
        if out is not None:
            layer.count("chosen")
        return out
    if query.shape[2] > 1:
        decode.after_prefill(role, query, key, **how)
    if not isinstance(mask, PrefillMask) or mask.tokens.ranges is None:
        return None
    if no_kernel(settings.backend, query, key, value) is not None:
        return None
    firsts = [start for start, _ in mask.tokens.ranges]
    out = decode.attend_chunk(number, role, query, key, value, firsts, **how)
    if out is not None:
        layer.count("sparse")
    return out
