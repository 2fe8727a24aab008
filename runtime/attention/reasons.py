"""Why a call is not served sparsely, in words that go into the log, into stats() and into docs/runtime.md."""

from __future__ import annotations

import subprocess

import torch

from artifacts.errors import one_line, shorten
from kernels.patterns import LayerPlan
from runtime.attention.calls import Call, no_kernel, special
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
    if q_len < layer.fewest or call.key.shape[2] < settings.dense_below:
        return "short"
    if isinstance(mask, PrefillMask) and mask.tokens.longest < settings.dense_below:
        return "short"
    reason = no_pattern(call, layer.plan)
    if reason is not None:
        settings.refuse(reason)
    return reason


def no_pattern(call: Call, plan: LayerPlan) -> str | None:
    """Why no kernel of ours can serve the call by a plan, None where one can."""
    if call.window is not None or (isinstance(call.mask, PrefillMask) and call.mask.tokens.window is not None):
        return special(call) or SLIDES
    if reason := unserved(call):
        return reason
    heads = call.query.shape[1], call.key.shape[1]
    if heads != (planned := (len(plan.patterns), plan.num_kv_heads)):
        return f"the layer has {heads} query and KV heads, the plan is for {planned}"
    return None


def unserved(call: Call) -> str | None:
    """Why no kernel of ours can serve the call of a prefill, by patterns or over every key; None where one can."""
    query, key, mask = call.query, call.key, call.mask
    assert call.layer is not None
    if reason := special(call):
        return reason
    if not isinstance(mask, PrefillMask) or mask.tokens.sequences is None:
        return "the mask is not causal over contiguous tokens (overlaid, with holes, or made by hand)"
    tokens, lengths = mask.tokens, call.more.get("cu_seq_lens_q")
    if lengths is not None and lengths.numel() > 2 and tokens.packed is None:
        return "sequences are packed by cu_seq_lens alone (give position_ids that restart, and use_cache=False)"
    if (query.shape[0], query.shape[2], key.shape[2]) != (tokens.batch, tokens.q_len, tokens.k_len):
        return "the cache holds other keys than the mask is for"
    return no_kernel(call.layer.settings.backend, query, key, call.value)


def name_of(error: Exception) -> str | None:
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
