"""Why a call is not served sparsely, in words that go into the log, into stats() and into docs/runtime.md."""

from __future__ import annotations

import subprocess

import torch

from artifacts.errors import one_line, shorten
from runtime.attention.calls import Call, no_kernel, special
from runtime.attention.layout import MIN_QUERIES
from runtime.attention.masks import PrefillMask

SLIDES = "the layer slides, and the artifact has patterns for it"
# What the allocators of torch say where they raise no error of their own.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "std::bad_alloc", "out of memory")


def why_dense(call: Call) -> str | None:
    """Why the call is not sparse, None where it is; refuses what should have been sparse and cannot."""
    layer, mask, q_len = call.layer, call.mask, call.query.shape[2]
    assert layer is not None
    if q_len == 1:
        return "decode"
    if layer.plan is None:
        return "layer left alone"
    settings = layer.settings
    if q_len < MIN_QUERIES or call.key.shape[2] < settings.dense_below:
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
    if reason := special(call):
        return reason
    if call.window is not None:
        return SLIDES
    if not isinstance(mask, PrefillMask) or mask.tokens.sequences is None:
        return "the mask is not causal over contiguous tokens (overlaid, with holes, or made by hand)"
    if mask.tokens.window is not None:
        return SLIDES
    lengths = call.more.get("cu_seq_lens_q")
    if lengths is not None and lengths.numel() > 2 and mask.tokens.packed is None:
        return "sequences are packed by cu_seq_lens alone (give position_ids that restart, and use_cache=False)"
    batch, heads, q_len, _ = query.shape
    _, kv_heads, k_len, _ = key.shape
    tokens = mask.tokens
    if (batch, q_len, k_len) != (tokens.batch, tokens.q_len, tokens.k_len):
        return "the cache holds other keys than the mask is for"
    planned = (len(layer.plan.patterns), layer.plan.num_kv_heads)
    if (heads, kv_heads) != planned:
        return f"the layer has {(heads, kv_heads)} query and KV heads, the plan is for {planned}"
    return no_kernel(layer.settings.backend, query, key, call.value)


def fault(error: Exception) -> str | None:
    """What to call an error of a kernel or of the memory that it wanted; None where it is somebody's mistake.

    The words are few, however much the messages differ: they are what is counted and said once.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return "out of memory"
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY):
        return "out of memory"
    module = type(error).__module__.partition(".")[0]
    if isinstance(error, RuntimeError | OSError | subprocess.SubprocessError) or module == "triton":
        return f"a kernel failed with {type(error).__name__}"
    return None


def message(error: Exception) -> str:
    """The first line of what an error says."""
    lines = str(error).strip().splitlines()
    return shorten(one_line(lines[0]), 200)[1:-1] if lines else "no message"
