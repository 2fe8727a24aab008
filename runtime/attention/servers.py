"""Servers of the core: a few queries, a prefill by patterns, and one by a dense kernel.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kernels import registry
from kernels.call import MAX_QUERIES, AttentionCall, DecodeCall
from kernels.dense import dense_attention
from runtime.attention.call import Call
from runtime.attention.chunk import Chunk
from runtime.attention.context import MIN_QUERIES, is_long, kernel_for
from runtime.attention.dense import default_attention, faster, needs_eager
from runtime.attention.failures import attempt
from runtime.attention.layer import Served
from runtime.attention.mask import starts_of

SLIDES = "the layer slides, and the artifact has patterns for it"
NOT_CAUSAL = (
    "the mask is not causal over contiguous tokens (packed, overlaid, with holes, or made by hand)"
)
# With fewer float32 keys torch's own attention is as fast in a decode step.
_MIN_KEYS_FLOAT32 = 256


def serve_step(call: Call) -> Served | None:
    """A few queries behind all keys, by the decode kernel."""
    if call.q_shape[2] > MAX_QUERIES:
        return None
    out = attempt(call, attend_step)
    if isinstance(out, Tensor):
        return Served(out, "decode by kernel")
    call.why_dense = out or call.why_dense
    return None


def serve_by_patterns(call: Call) -> Served | None:
    """A prefill by the layer's patterns."""
    if call.q_shape[2] <= MAX_QUERIES:
        return None
    if call.why_dense is None:
        kernel, no_kernel = kernel_of(call)
        call.why_dense = _why_dense(call, no_kernel)
    if call.why_dense is not None:
        return None
    out = attempt(call, attend_sparse, kernel)
    if isinstance(out, Tensor):
        return Served(out, "sparse")
    call.why_dense = out
    return None


def serve_by_dense_kernel(call: Call) -> Served | None:
    """A prefill over every key, or those of the layer's window, by Headwise's kernel."""
    if call.q_shape[2] <= MAX_QUERIES:
        return None
    kernel, name = dense_kernel(call, call.why_dense or dense_reason(call) or "short")
    if not kernel:
        return None
    out = attempt(call, attend_by_kernel, kernel)
    if isinstance(out, Tensor):
        return Served(out, name)
    call.why_dense = out
    return None


def dense_kernel(call: Call, why_dense: str) -> tuple[str, str]:
    """Kernel that serves a dense prefill, "" where the model's attention does; its name in stats().

    Args:
        call: the call.
        why_dense: the reason why it is not sparse.
    """
    nothing = "", why_dense
    kernel, no_kernel = kernel_of(call)
    context = call.context
    if no_kernel is not None or context is None or not context.sequences or not pays(call):
        return nothing
    settings = call.layer.settings
    if context.window is not None:
        if not settings.dense_kernels or call.q_shape[2] < MIN_QUERIES:
            return nothing
        return kernel, "window by kernel" if call.layer.plan is None else why_dense
    k_len = call.k_shape[2]
    logits = call.logits
    if logits.window is not None or settings.kernel_from is None or k_len < settings.kernel_from:
        return nothing
    # Eager attention stores every weight.
    if (
        settings.dense_by == "kernel"
        or needs_eager(call)
        or faster(call.query, call.key, call.value) == "kernel"
    ):
        return kernel, "dense by kernel"
    return nothing


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
    if call.logits.window is not None or (context is not None and context.window is not None):
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
    logits = call.logits
    # A window that holds every key is no window.
    if logits.window is not None and k_len > logits.window:
        return None
    starts: Tensor | None = None
    if mask is not None and mask.shape[-1] != k_len:
        # The cache of this layer has another length than the others: sdpa refuses that mask, and
        # the kernel does not check it.
        return None
    contiguous, starts = starts_of(mask)
    if not contiguous:
        return None
    if logits.sinks is not None or call.unsupported_reason is not None:
        return None
    k_batch, kv_heads, _, k_dim = call.k_shape
    if k_batch != batch or k_dim != dim or not k_len or heads % kv_heads:
        return None
    v_batch, v_heads, v_len, _ = v.shape
    if v_batch != batch or v_heads != kv_heads or v_len != k_len:
        return None
    # The conditions above imply its checks.
    step = DecodeCall(q, k, v, logits=logits, starts=starts, checked=False)
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
    keys, ragged = context.rows_of(long)
    if keys is not None:
        k = k[:, :, keys]
        v = v[:, :, keys]
    index = plan.build(q, k, scale=call.logits.factor(call.q_shape[3]), ragged=ragged)
    attention = AttentionCall(q, k, v, index, logits=call.logits)
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
    keys, ragged = context.rows_of(context.sequences)
    if keys is not None:
        k = k[:, :, keys]
        v = v[:, :, keys]
    logits = replace(call.logits, window=context.window)
    out, _ = dense_attention(call.query, k, v, logits=logits, ragged=ragged, backend=kernel)
    return out.transpose(1, 2)


def _attend_alone(call: Call, sequence: Chunk) -> Tensor:
    """(1, Q, H, E) of one sequence, densely by the faster way; its mask is not read."""
    assert call.context is not None
    alone = call.alone(sequence, call.context.alone(sequence))
    kernel, _ = dense_kernel(alone, "short")
    if kernel:
        # A few queries are served by the decode kernels.
        if sequence.q_len <= MAX_QUERIES:
            kernel = call.layer.settings.backend
        return attend_by_kernel(alone, kernel)
    return default_attention(alone)[0]
