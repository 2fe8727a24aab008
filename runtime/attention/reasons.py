"""Which kernel serves a prefill, worked out once a forward, and why a call is not sparse, in the
words of stats()."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from artifacts import HeadwiseError
from artifacts.errors import one_line, shorten
from kernels import dispatch
from kernels.breaker import CannotBuildError
from runtime.attention.calls import Call, no_kernel

SLIDES = "the layer slides, and the artifact has patterns for it"
NOT_OURS = "this cache is not one of new_cache(): it keeps every token, whatever kv_cache says"
NOT_CAUSAL = (
    "the mask is not causal over contiguous tokens (packed, overlaid, with holes, or made by hand)"
)
# What the allocators of torch say where they raise no error of their own.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "std::bad_alloc", "out of memory")
_Served = TypeVar("_Served")


@dataclass(eq=False)
class Verdict:
    """The kernel, by its backend's name, that serves calls by patterns, every key or a window; or
    why none can.

    heads: query and KV heads of the calls.
    """

    kernel: str
    why: str | None = None
    heads: tuple[int, int] | None = None


def verdict_of(call: Call) -> Verdict:
    """What serves a call of a prefill. Layers whose tensors are alike share what the first of them
    has found out."""
    if (reason := call.special) is not None:
        return Verdict("", reason)
    if (tokens := call.tokens) is None:
        return Verdict("", NOT_CAUSAL)
    q = call.query
    k = call.key
    v = call.value
    kind = (q.dtype, q.device, q.shape, k.shape, v.shape)
    if (found := tokens.verdicts.get(kind)) is None:
        found = tokens.verdicts[kind] = _work_out(call)
    return found


def _work_out(call: Call) -> Verdict:
    query = call.query
    key = call.key
    value = call.value
    tokens = call.tokens
    lengths = call.more.get("cu_seq_lens_q")
    assert tokens is not None
    if tokens.sequences is None:
        return Verdict("", NOT_CAUSAL)
    if lengths is not None and lengths.numel() > 2:
        return Verdict("", "sequences are packed by cu_seq_lens alone")
    if (query.shape[0], query.shape[2], key.shape[2]) != (tokens.batch, tokens.q_len, tokens.k_len):
        return Verdict("", "the cache holds other keys than the mask is for")
    return kernel_for(call.layer.settings.backend, query, key, value)


def kernel_for(backend: str, query: Tensor, key: Tensor, value: Tensor) -> Verdict:
    """What serves queries, keys and values like these, whatever the mask."""
    if key.shape[:3] != value.shape[:3]:
        return Verdict(
            "", f"keys and values do not go together: {tuple(key.shape)}, {tuple(value.shape)}"
        )
    if reason := no_kernel(backend, query, key, value):
        return Verdict("", reason)
    # By its name: a kernel that turns out not to build is not replaced by the reference, which is
    # slower than dense.
    kernel = dispatch.fastest(query, key, value) if backend == "auto" else backend
    return Verdict(kernel, heads=(query.shape[1], key.shape[1]))


def too_few(call: Call) -> str | None:
    """Why a call is dense whatever its mask is; None where it has to be sparse."""
    layer = call.layer
    tokens = call.tokens
    q_len = call.query.shape[2]
    if q_len == 1:
        return "decode"
    if layer.plan is None:
        return "layer left alone"
    below = layer.settings.dense_below
    if (
        q_len < layer.fewest
        or call.key.shape[2] < below
        or (tokens is not None and tokens.longest < below)
    ):
        return "short"
    return None


def why_dense(call: Call, verdict: Verdict) -> str | None:
    """Why the call is not sparse, None where it is; refuses what should have been sparse and
    cannot."""
    if (reason := too_few(call)) is not None:
        return reason
    reason = verdict.why
    tokens = call.tokens
    layer = call.layer
    if call.window is not None or (tokens is not None and tokens.window is not None):
        reason = call.special or SLIDES
    elif reason is None and verdict.heads != layer.planned_heads:
        reason = (
            f"the layer has {verdict.heads} query and KV heads, the plan "
            f"is for {layer.planned_heads}"
        )
    if reason is not None:
        layer.settings.refuse(reason)
    return reason


def attempt(call: Call, serve: Callable[..., _Served], *more: object) -> _Served | str:
    """What serve(call, ...), a kernel of ours, gives, or in words what went wrong; strict
    applications raise that."""
    try:
        return serve(call, *more)
    except HeadwiseError:
        raise
    except Exception as error:
        why = name_of(error)
        if why is None:
            raise
        call.layer.settings.refuse(why, message(error))
    if call.tokens is not None:
        # The kernel may serve no more.
        call.tokens.verdicts.clear()
    # Out here the error and all that its frames held are gone: dense attention has their memory.
    return why


def name_of(error: Exception) -> str | None:
    """What to call an error of a kernel or of the memory that it wanted; None where it is
    somebody's mistake.

    The words are few, however much the messages differ: they are what is counted and said once.
    """
    if isinstance(error.__cause__, CannotBuildError):
        # Of a kernel that was asked for by its name.
        error = error.__cause__
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
