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
from runtime.attention.layout import Layout, Split
from runtime.attention.masks import PrefillMask, headwise_mask, starts_of
from runtime.attention.own import attend_densely, causal_mask
from runtime.attention.paged import PAGED_NAME, attend_paged
from runtime.attention.reasons import message, name_of, unserved, why_dense
from runtime.attention.state import MIN_QUERIES, Layer, layer_of
from runtime.caches.kept import attend_kept
from runtime.dense import faster, right
from runtime.lossless.attention import round_of
from runtime.low_memory.attention import tape_of
from runtime.omnikv.offload import on_device
from runtime.standin import NewTokens

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
    fault = None
    if layer.role is not None:
        chosen = _attempt(_chosen, call, layer)
        if isinstance(chosen, Tensor):
            return chosen.transpose(1, 2), None
        fault = chosen
        call = call._replace(key=on_device(key), value=on_device(value))
    return (_step if query.shape[2] <= MAX_QUERIES else _prefill)(call, layer, fault)


def _step(call: Call, layer: Layer, fault: str | None) -> tuple[Tensor, Tensor | None]:
    """A few queries, as decode has them: every key by our kernel, or what the model had.

    fault: what went wrong with chosen tokens, None where nothing did.
    """
    done = _attempt(attend_step, call, layer)
    if isinstance(done, Tensor):
        layer.count("decode by kernel")
        return done, None
    layer.count(done or fault or why_dense(call) or "short")
    return attend_densely(call)


def _prefill(call: Call, layer: Layer, fault: str | None) -> tuple[Tensor, Tensor | None]:
    """Many queries: the layer's patterns, every key or a window by our kernel, or what the model had."""
    why = fault or why_dense(call)
    if why is None:
        served = _attempt(_by_patterns, call, layer)
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


def _by_patterns(call: Call, layer: Layer) -> Tensor | None:
    """(B, Q, H, E) by the layer's patterns; None where dense attention is known, or found, to be faster."""
    assert isinstance(call.mask, PrefillMask)
    layout = call.mask.tokens
    split = layout.split(layer.settings.dense_below, layer.fewest)
    # Turns on a past: not all are worth an index.
    if layout.q_start:
        q, k = call.query, call.key
        gains = {part: layer.gains(q, k, part.q_len, part.k_len) for part in split.long}
        split = layout.apart(tuple(part for part, gained in gains.items() if gained is not False))
        alike = layout.together is not None and layout.together.ragged is None
        if alike and None in gains.values():
            lengths = split.long[0].q_len, split.long[0].k_len
            return layer.turns.measure(q, k, lengths, lambda: _sparse(call, layer, split), lambda: _dense(call, layer))
    return _sparse(call, layer, split) if split.long else None


def _dense(call: Call, layer: Layer) -> Tensor:
    out = None if _dense_by_kernel(call, layer) is None else _every_key(call, layer)
    return attend_densely(call)[0] if out is None else out


def _attempt(serve: Callable[[Call, Layer], _Served], call: Call, layer: Layer) -> _Served | str:
    """What a kernel of ours gives, or in words what went wrong inside it; strict applications raise that."""
    try:
        return serve(call, layer)
    except HeadwiseError:
        raise
    except Exception as error:
        why = name_of(error)
        if why is None:
            raise
        layer.settings.refuse(why, message(error))
    # Out here the error and all that its frames held are gone: dense attention has their memory.
    return why


def _sparse(call: Call, layer: Layer, split: Split) -> Tensor:
    """(B, Q, H, E): the long sequences in one launch, others and spans densely, zeros for padded queries."""
    assert split.together is not None
    query, key, value = call.query, call.key, call.value
    out = attend(call, split.together, layer.plan)
    for part in split.short:
        one, queries, keys = slice(part.row, part.row + 1), slice(part.q_start, part.q_start + part.q_len), part.keys
        alone = call._replace(query=query[one, :, queries], key=key[one, :, keys], value=value[one, :, keys])
        layout = Layout(part.k_len - part.q_len, part.q_len, part.k_len, ((0, part.k_len),))
        if _dense_how(alone, layer, layout):
            assert layout.together is not None
            out[one, queries] = attend(alone, layout.together, None)
        else:
            out[one, queries] = attend_densely(alone._replace(mask=causal_mask(alone.query, alone.key)))[0]
    return _with_spans(call, out)


def _every_key(call: Call, layer: Layer) -> Tensor | None:
    """(B, Q, H, E) by our kernel over every key, or those of the layer's window."""
    assert isinstance(call.mask, PrefillMask)
    layout = call.mask.tokens
    if layout.together is None:
        return None
    return _with_spans(call, attend(call, layout.together, None, window=layout.window))


def _with_spans(call: Call, out: Tensor) -> Tensor:
    """Attention (B, Q, H, E) with that of spans put in, whose tokens see each other both ways, under their own mask."""
    assert isinstance(call.mask, PrefillMask)
    layout = call.mask.tokens
    for row, spans in enumerate(layout.spans or ()):
        for begin, end in spans:
            least = layout.sequences[row][1] if layout.sequences else 0
            keys = slice(max(least, 0 if layout.window is None else begin - layout.window + 1), end)
            one, rows = slice(row, row + 1), slice(begin - layout.q_start, end - layout.q_start)
            mask = call.mask.of_queries(rows.start, end - begin)[one, ..., keys]
            alone = call._replace(query=call.query[one, :, rows], key=call.key[one, :, keys], mask=mask)
            out[one, rows] = attend_densely(alone._replace(value=call.value[one, :, keys]))[0]
    return out


def _dense_by_kernel(call: Call, layer: Layer) -> str | None:
    """What a dense call that our kernel serves is counted as, "" for why it is dense; None where it does not serve."""
    mask = call.mask
    if not isinstance(mask, PrefillMask) or (call.window is not None and mask.tokens.window is None):
        return None
    how = None if mask.tokens.sequences is None else _dense_how(call, layer, mask.tokens)
    return None if how is None or unserved(call) is not None else how


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
    if query.shape[2] <= MAX_QUERIES and (lossless := round_of(decode)) is not None:
        layer.count("chosen" if lossless.drafting else "verified")
        return lossless.attend(number, query, key, value, **how)
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
