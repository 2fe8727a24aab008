"""The attention function registered with transformers: selects a kernel for each call.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kernels import registry
from kernels.call import MAX_QUERIES, AttentionCall, DecodeCall
from kernels.dense import dense_attention
from runtime.attention.context import MIN_QUERIES, Sequence, is_long, kernel_for
from runtime.attention.dense import default_attention, faster
from runtime.attention.evicting import attend_evicting
from runtime.attention.mask import context_of, headwise_mask, starts_of
from runtime.attention.state import ATTENTION_NAME, UNAPPLIED_LAYER, Call, attempt, layer_of
from runtime.autocast import in_one_dtype
from runtime.lazy import LazyTensor, NewTokens
from runtime.omnikv.bank import fetched
from runtime.omnikv.decode import LayerCall
from runtime.omnikv.session import CACHE, filter_cache_of

SLIDES = "the layer slides, and the artifact has patterns for it"
NOT_OURS = "this cache is not one of new_cache(): it keeps every token, whatever kv_cache says"
NOT_CAUSAL = (
    "the mask is not causal over contiguous tokens (packed, overlaid, with holes, or made by hand)"
)
# With fewer float32 keys torch's own attention is as fast in a decode step.
_MIN_KEYS_FLOAT32 = 256


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
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer as transformers calls it: (B, Q, H, E), and the weights or None.

    query (B, H, Q, D), key (B, G, K, D), value (B, G, K, E).
    """
    layer = layer_of(module)
    state = layer or UNAPPLIED_LAYER
    cache = more.pop(CACHE, None)
    if layer is not None:
        query, key, value = _in_one_dtype(query, key, value)
    arguments = (module, state, query, key, value, attention_mask, dropout, scaling, more)
    if torch.compiler.is_compiling():
        # A process that compiles nothing does without torch's compiler: seconds, and Triton.
        from runtime.attention.compiled import between_graphs

        call = Call(*arguments, None)
        if is_traced(call):
            return default_attention(call)
        tensors = query, key, value, attention_mask
        result: tuple[Tensor, Tensor | None] = between_graphs(
            headwise_attention, module, *tensors, dropout, scaling, **more | {CACHE: cache}
        )
        return result
    call = Call(*arguments, context_of(attention_mask))
    if layer is None:
        return default_attention(call)

    # A cache that drops tokens.
    if isinstance(key, NewTokens):
        return attend_evicting(call, key.layer), None
    if layer.settings.evicts and key.shape[2] != query.shape[2]:
        layer.settings.warn_once(NOT_OURS)

    # A layer of the decode section: tokens selected by a filter layer.
    failure = None
    if layer.role is not None:
        out = attempt(call, attend_selected, cache)
        if isinstance(out, Tensor):
            return out.transpose(1, 2), None
        failure = out
        call = call.on(fetched(key), fetched(value))

    # A few queries.
    if call.q_shape[2] <= MAX_QUERIES:
        out = attempt(call, attend_step)
        if isinstance(out, Tensor):
            layer.count("decode by kernel")
            return out, None
        layer.count(out or failure or dense_reason(call) or "short")
        return default_attention(call)

    # A prefill: patterns, else every key or a window by Headwise's kernel, else the model's own.
    way, kernel, name = select_path(call, failure)
    if way == "sparse":
        out = attempt(call, attend_sparse, kernel)
        if isinstance(out, Tensor):
            layer.count(name)
            return out, None
        way, kernel, name = select_path(call, out)
    if way == "kernel":
        out = attempt(call, attend_by_kernel, kernel)
        if isinstance(out, Tensor):
            layer.count(name)
            return out, None
        name = out
    layer.count(name)
    return default_attention(call)


def is_traced(call: Call) -> bool:
    """True if a call that is being compiled is part of the graph: a few queries of a plain layer.

    It is not counted: a counter would have the graph compiled again at each step. The graph breaks
    at prefills, and at decode and kv_cache sections.
    """
    layer = call.layer
    return layer.role is None and not layer.settings.evicts and call.q_shape[2] < MIN_QUERIES


def _in_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values in the dtype that attention computes in.

    A lazy tensor already has it, from its cache.
    """
    if isinstance(key, LazyTensor):
        return query.to(key.dtype), key, value
    return in_one_dtype(query, key, value)


def select_path(call: Call, why_dense: str | None = None) -> tuple[str, str, str]:
    """Select how a prefill is served.

    Args:
        call: the call.
        why_dense: the reason why it is not sparse, if that is already known.

    Returns:
        "sparse", "kernel" or "default"; the name of its kernel; its name in stats().
    """
    kernel, no_kernel = kernel_of(call)
    if why_dense is None:
        why_dense = _why_dense(call, no_kernel)
    if why_dense is None:
        return "sparse", kernel, "sparse"
    context = call.context
    if no_kernel is not None or context is None or not context.sequences or not pays(call):
        return "default", "", why_dense
    settings = call.layer.settings
    if context.window is not None:
        if settings.dense_kernels and call.q_shape[2] >= MIN_QUERIES:
            name = "window by kernel" if call.layer.plan is None else why_dense
            return "kernel", kernel, name
        return "default", "", why_dense
    k_len = call.k_shape[2]
    if call.window is not None or settings.kernel_from is None or k_len < settings.kernel_from:
        return "default", "", why_dense
    # The alternative for soft-caps and sinks, eager attention, stores every weight.
    weights = (
        settings.model_attention == "eager" or call.softcap is not None or call.sinks is not None
    )
    if (
        settings.dense_by == "kernel"
        or weights
        or faster(call.query, call.key, call.value) == "kernel"
    ):
        return "kernel", kernel, "dense by kernel"
    return "default", "", why_dense


def kernel_of(call: Call) -> tuple[str, str | None]:
    """Backend that serves a prefill, by its name, and the reason why none can, or None.

    The first layer of a forward selects it; the others read it from the context, by the kind of
    their tensors.
    """
    reason = call.unsupported_reason
    if reason is not None:
        return "", reason
    context = call.context
    if context is None or context.ranges is None:
        return "", NOT_CAUSAL
    q = call.query
    k = call.key
    v = call.value
    kind = (q.dtype, q.device, call.q_shape, call.k_shape, v.shape)
    cached = context.kernels.get(kind)
    if cached is not None:
        return cached
    batch, _, q_len, _ = call.q_shape
    k_len = call.k_shape[2]
    lengths = call.more.get("cu_seq_lens_q")
    choice: tuple[str, str | None]
    if lengths is not None and lengths.numel() > 2:
        choice = "", "sequences are packed by cu_seq_lens alone"
    elif (batch, q_len, k_len) != (context.batch, context.q_len, context.k_len):
        choice = "", "the cache holds other keys than the mask is for"
    else:
        choice = kernel_for(call.layer.settings.backend, q, k, v)
    context.kernels[kind] = choice
    return choice


def pays(call: Call) -> bool:
    """True if a prefill has enough keys for a kernel of Headwise."""
    settings = call.layer.settings
    q_len = call.q_shape[2]
    k_len = call.k_shape[2]
    if settings.kernel_from is not None and k_len >= settings.kernel_from:
        return True
    if q_len < MIN_QUERIES:
        return False
    window = None if call.context is None else call.context.window
    if window is not None and k_len > window:
        return settings.dense_kernels
    return k_len >= settings.dense_below


def _why_dense(call: Call, no_kernel: str | None) -> str | None:
    """Reason why a prefill is dense, None where it is sparse; refuses one that should be sparse.

    Args:
        call: the call of a prefill.
        no_kernel: the reason why no kernel serves it, None where one does.
    """
    few = dense_reason(call)
    if few is not None:
        return few
    layer = call.layer
    context = call.context
    reason = no_kernel
    if call.window is not None or (context is not None and context.window is not None):
        reason = call.unsupported_reason or SLIDES
    elif reason is None:
        heads = call.q_shape[1], call.k_shape[1]
        if heads != layer.planned_heads:
            reason = (
                f"the layer has {heads} query and KV heads, the plan is for {layer.planned_heads}"
            )
    if reason is not None:
        layer.settings.refuse(reason)
        return reason
    return None


def dense_reason(call: Call) -> str | None:
    """Return the reason why a call is dense with any mask; None if it has to be sparse."""
    layer = call.layer
    context = call.context
    q_len = call.q_shape[2]
    if q_len == 1:
        return "decode"
    if layer.plan is None:
        return "layer left alone"
    lengths = layer.settings.dense_below, layer.plan.dense_tail
    if context is None:
        long = is_long(q_len, call.k_shape[2], *lengths)
    else:
        long = bool(context.long(*lengths))
    return None if long else "short"


def attend_selected(call: Call, cache: Any) -> Tensor | None:
    """(B, H, Q, E) over selected tokens, of all or of a chunk's past; None if there are none.

    Args:
        call: the call.
        cache: the cache of the forward, None without one: then every token is attended to.
    """
    layer = call.layer
    decode = layer.settings.decode
    role = layer.role
    assert decode is not None and role is not None
    q_len = call.q_shape[2]
    k_len = call.k_shape[2]
    if cache is None:
        return None
    own = None
    if role.is_filter:
        decode.forget(cache, layer.number)
        own = filter_cache_of(cache, layer.number, call.k_shape[0], k_len)
    contiguous, starts = starts_of(call.mask)
    if not contiguous or call.sinks is not None or call.window is not None:
        return None
    if call.unsupported_reason is not None:
        return None
    mine = LayerCall(
        layer.number,
        role,
        call.query,
        call.key,
        call.value,
        starts,
        call.scale,
        call.softcap,
        cache,
        own,
    )
    if q_len <= MAX_QUERIES and k_len > decode.count(k_len):
        out = decode.attend(mine)
        if out is not None:
            layer.count("chosen")
        return out
    if own is not None and q_len > 1:
        decode.after_prefill(mine, own)
    context = call.context
    if context is None or context.ranges is None:
        return None
    if q_len <= MAX_QUERIES or not pays(call):
        return None
    kernel, reason = kernel_of(call)
    if reason is not None:
        return None
    firsts = [start for start, _ in context.ranges]
    out = decode.attend_chunk(mine, firsts, backend=kernel)
    if out is not None:
        layer.count("sparse")
    return out


def attend_step(call: Call) -> Tensor | None:
    """(B, Q, H, E) of a few queries behind all keys, on the CPU; None if sdpa has to serve them.

    With one bfloat16 query and 256 keys or more, torch's attention on the CPU took 10 to 100 times
    as long.
    """
    q = call.query
    k = call.key
    v = call.value
    mask = call.mask
    batch, heads, q_len, dim = call.q_shape
    k_len = call.k_shape[2]
    if not call.layer.settings.steps or not q.is_cpu:
        return None
    # A short prompt.
    if q_len == k_len > 1:
        return None
    if k_len < _MIN_KEYS_FLOAT32 and q.dtype == torch.float32:
        return None
    # A window that holds every key is no window.
    if call.window is not None and k_len > call.window:
        return None
    starts: Tensor | None = None
    if mask is not None and mask.shape[-1] != k_len:
        # The cache of this layer has another length than the others: sdpa refuses that mask, and
        # the kernel does not check it.
        return None
    contiguous, starts = starts_of(mask)
    if not contiguous:
        return None
    if call.sinks is not None or call.unsupported_reason is not None:
        return None
    k_batch, kv_heads, _, k_dim = call.k_shape
    if k_batch != batch or k_dim != dim or not k_len or heads % kv_heads:
        return None
    v_batch, v_heads, v_len, _ = v.shape
    if v_batch != batch or v_heads != kv_heads or v_len != k_len:
        return None
    # The conditions above imply its checks.
    step = DecodeCall(q, k, v, starts=starts, scale=call.scale, softcap=call.softcap, checked=False)
    native = registry.implementation("decode", "cpu")
    if native.supports(step) is not None:
        return None
    out: Tensor = native.run(step).out
    return out.transpose(1, 2)


def attend_sparse(call: Call, kernel: str) -> Tensor:
    """(B, Q, H, E) of a prefill: long sequences by the layer's patterns, others densely."""
    context = call.context
    plan = call.layer.plan
    assert context is not None and plan is not None
    settings = call.layer.settings
    long = context.long(settings.dense_below, plan.dense_tail)
    settings.check_length(max(sequence.k_len for sequence in long))
    q = call.query
    k = call.key
    v = call.value
    keys, ragged = context.batch_of(long)
    if keys is not None:
        k = k[:, :, keys]
        v = v[:, :, keys]
    index = plan.build(q, k, scale=call.scale, ragged=ragged)
    attention = AttentionCall(
        q, k, v, index, scale=call.scale, softcap=call.softcap, sinks=call.sinks
    )
    out: Tensor = registry.run_by("attention", kernel, attention)[0].transpose(1, 2)
    for sequence in context.sequences:
        if sequence not in long:
            row, queries, _ = sequence.slots
            out[row, queries] = _attend_alone(call, sequence)
    return out


def attend_by_kernel(call: Call, kernel: str) -> Tensor:
    """(B, Q, H, E) by Headwise's kernel over every key, or those of the layer's window."""
    context = call.context
    assert context is not None
    k = call.key
    v = call.value
    keys, ragged = context.batch_of(context.sequences)
    if keys is not None:
        k = k[:, :, keys]
        v = v[:, :, keys]
    options: dict[str, Any] = {"scale": call.scale, "softcap": call.softcap, "sinks": call.sinks}
    out: Tensor = dense_attention(
        call.query, k, v, window=context.window, ragged=ragged, **options, backend=kernel
    )[0]
    return out.transpose(1, 2)


def _attend_alone(call: Call, sequence: Sequence) -> Tensor:
    """(1, Q, H, E) of one sequence, densely by the faster way; its mask is not read."""
    assert call.context is not None
    alone = call.alone(sequence, call.context.alone(sequence))
    way, kernel, _ = select_path(alone, "short")
    if way == "kernel":
        # A few queries are served by the decode kernels.
        if sequence.q_len <= MAX_QUERIES:
            kernel = call.layer.settings.backend
        return attend_by_kernel(alone, kernel)
    return default_attention(alone)[0]
