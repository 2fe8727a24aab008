"""Attention inside torch.compile: decode is traced; a prefill is served between graphs, uncompiled.

Importing this module imports torch's compiler: only code that is being compiled does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runtime.attention.dense import default_attention
from runtime.attention.state import MIN_QUERIES, Call


def attend_traced(call: Call) -> tuple[Tensor, Tensor | None]:
    """A call that is being compiled: (B, Q, H, E), and the weights or None.

    A few queries are part of the graph, and not counted: a counter would have the graph compiled
    again at each step. The graph breaks at all others, and at decode and kv_cache sections."""
    layer = call.layer
    plain = layer.role is None and not layer.settings.evicts
    if plain and call.query.shape[2] < MIN_QUERIES:
        return default_attention(call)
    tensors = call.query, call.key, call.value, call.mask
    return _attention(call.module, *tensors, call.dropout, call.scale, **call.more)


@torch.compiler.disable
def _attention(*args: Any, **more: Any) -> tuple[Tensor, Tensor | None]:
    from runtime.attention.function import headwise_attention

    return headwise_attention(*args, **more)


@torch.compiler.disable
def prefill_mask(batch_size: int, q_length: int, kv_length: int, **more: Any) -> Any:
    """The mask of a prefill, with its context, between graphs."""
    from runtime.attention.mask import headwise_mask

    return headwise_mask(batch_size, q_length, kv_length, **more)
