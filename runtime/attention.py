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
from runtime.attention_tiles import tape_of
from runtime.calls import Call
from runtime.every_key import attend_to_every_key
from runtime.faults import fault, message
from runtime.masks import PrefillMask, headwise_mask, starts_of
from runtime.offload import on_device
from runtime.own import attend_densely
from runtime.policies.kept import attend_kept
from runtime.policies.standin import NewTokens
from runtime.reasons import no_kernel, special, why_dense
from runtime.sparse import attend_sparsely
from runtime.state import Layer, layer_of
from runtime.without_mask import attend_by_kernel

ATTENTION_NAME = "headwise"
_Served = TypeVar("_Served")


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

    query (B, H, Q, D), key (B, G, K, D), value (B, G, K, E) -> (B, Q, H, E) and the weights where asked for.
    """
    layer = layer_of(module)
    tape = None if layer is None or not layer.settings.low_memory else tape_of(module)
    if tape is not None:
        asked = {"dropout": dropout, "scaling": scaling, **kwargs}
        return tape.attend(query, key, value, attention_mask, asked)
    call = Call(module, layer, query, key, value, attention_mask, dropout, scaling, kwargs)
    if torch.compiler.is_compiling():
        # A process that compiles nothing does without torch's compiler: seconds, and Triton.
        from runtime.compiled import attend_traced

        return attend_traced(call)
    if layer is None:
        return attend_densely(call)
    if isinstance(key, NewTokens):
        reason = special(call._replace(more={**kwargs, "sliding_window": None}))
        return attend_kept(layer, query, key.layer, attention_mask, scaling, call.softcap, reason), None
    chosen = None if layer.role is None else _attempt(layer, lambda: _chosen(call))
    if isinstance(chosen, Tensor):
        return chosen.transpose(1, 2), None
    call = call._replace(key=on_device(key), value=on_device(value))
    why = chosen or why_dense(call)
    if why is None:
        served = _attempt(layer, lambda: attend_sparsely(call))
        if isinstance(served, Tensor):
            layer.count("sparse")
            return served, None
        why = served
    if call.query.shape[2] <= MAX_QUERIES:
        step = _attempt(layer, lambda: attend_to_every_key(call))
        if isinstance(step, Tensor):
            layer.count("decode by kernel")
            return step, None
        why = step or why
    else:
        dense = _attempt(layer, lambda: attend_by_kernel(call))
        if isinstance(dense, tuple):
            layer.count(dense[1] or why)
            return dense[0], None
        why = dense or why
    layer.count(why)
    return attend_densely(call)


def _attempt(layer: Layer, serve: Callable[[], _Served]) -> _Served | str:
    """What a kernel of ours gives, or in words what went wrong inside it; strict applications raise that."""
    try:
        return serve()
    except HeadwiseError:
        raise
    except Exception as error:
        why = fault(error)
        if why is None:
            raise
        layer.settings.refuse(why, message(error))
    # Out here the error and all that its frames held are gone: dense attention has their memory.
    return why


def _chosen(call: Call) -> Tensor | None:
    """(B, H, Q, E) by the decode section of the artifact; None where that does not serve the call."""
    layer, query, key, value, mask = call.layer, call.query, call.key, call.value, call.mask
    assert layer is not None and layer.role is not None
    settings, role, number = layer.settings, layer.role, layer.number
    decode = settings.decode
    assert decode is not None
    starts = starts_of(mask)
    if isinstance(starts, str) or special(call) is not None:
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
