"""The attention function registered with transformers: asks the servers of a layer in turn.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from runtime.attention.applied import UNAPPLIED_LAYER, layer_of
from runtime.attention.call import CACHE, Call, logits_of
from runtime.attention.context import MIN_QUERIES
from runtime.attention.dense import default_attention
from runtime.attention.layer import ATTENTION_NAME
from runtime.attention.mask import context_of, headwise_mask
from runtime.attention.servers import dense_reason
from runtime.autocast import in_one_dtype
from runtime.lazy import LazyTensor


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
    logits = logits_of(scaling, more)
    arguments = (module, state, query, key, value, attention_mask, dropout, logits, more)
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
    call = Call(*arguments, context_of(attention_mask), cache)
    for serve in state.servers:
        served = serve(call)
        if served is not None:
            state.count(served.name)
            return served.out, None
    if layer is not None:
        layer.count(call.why_dense or dense_reason(call) or "short")
    return default_attention(call)


def is_traced(call: Call) -> bool:
    """True if a call that is being compiled is part of the graph: a few queries of a plain layer.

    It is not counted: a counter would have the graph compiled again at each step. The graph breaks
    at prefills, and at decode and kv_cache sections.
    """
    return not call.layer.plug_ins and call.q_shape[2] < MIN_QUERIES


def _in_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values in the dtype that attention computes in.

    A lazy tensor already has it, from its cache.
    """
    if isinstance(key, LazyTensor):
        return query.to(key.dtype), key, value
    return in_one_dtype(query, key, value)
