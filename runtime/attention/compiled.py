"""Attention inside a graph of torch.compile: decode is traced without a break, and a long prefill stays sparse.

What is traced changes nothing of Python's: a counter that is part of a graph would have it compiled again at each step.
A prefill is one operator, which at run time does what it does without a compiler.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runtime.attention.calls import Call
from runtime.attention.layout import Layout
from runtime.attention.masks import PrefillMask
from runtime.attention.own import attend_as_before
from runtime.attention.reasons import NOT_OURS, SLIDES
from runtime.attention.state import MIN_QUERIES, layer_of, module_of
from runtime.standin import NewTokens


def attend_traced(call: Call) -> tuple[Tensor, Tensor | None]:
    """The call as part of a graph: (B, Q, H, E), and the weights where they were asked for."""
    layer, query, key = call.layer, call.query, call.key
    if isinstance(key, NewTokens):
        return _uncompiled(call)
    if layer is None or layer.plan is None:
        return attend_as_before(call)
    if layer.settings.evicts and key.shape[2] != query.shape[2]:
        _say(layer.key, NOT_OURS)
    decode = layer.settings.decode
    if decode is not None and layer.role is not None and layer.role.filters and decode.serves(query, key):
        _say(layer.key, "decode is being compiled: it attends to every token, not to chosen ones")
    if query.shape[2] < MIN_QUERIES or key.shape[2] < layer.settings.dense_below:
        return attend_as_before(call)
    reason = call.special or (None if call.window is None else SLIDES)
    if reason is None and (call.mask is not None or query.shape[2] != key.shape[2]):
        reason = "the prefill is being compiled with a mask (padding, or slots of a static cache)"
    if reason is not None:
        _refuse(layer.key, reason)
        return attend_as_before(call)
    return _prefill(query, key, call.value, call.sinks, layer.key, call.scale, call.softcap), None


def _registered() -> Any:
    """What runs outside of the graph."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS["headwise"]


@torch.compiler.disable
def _uncompiled(call: Call) -> tuple[Tensor, Tensor | None]:
    """A cache under policies is Python's: the graph breaks here."""
    tensors = call.query, call.key, call.value, call.mask
    return _registered()(call.module, *tensors, call.dropout, call.scale, **call.more)


@torch.compiler.assume_constant_result
def _refuse(layer: int, reason: str) -> None:
    """Said, or raised, while the graph is made."""
    applied = layer_of(module_of(layer))
    if applied is not None:
        applied.settings.refuse(reason)


@torch.compiler.assume_constant_result
def _say(layer: int, what: str) -> None:
    applied = layer_of(module_of(layer))
    if applied is not None:
        applied.settings.say(what)


@torch.library.custom_op(
    "headwise::prefill",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? sinks, int layer, float? scale, float? softcap) -> Tensor",
)
def _prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    layer: int,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    """(B, Q, H, E) of whole sequences without padding: query (B, H, Q, D), key (B, G, Q, D), value (B, G, Q, E).

    sinks (H,): see kernels.attention.sparse_attention.
    """
    batch, _, length, _ = query.shape
    layout = Layout(0, length, length, ((0, length),) * batch)

    def make(may_skip: bool) -> Tensor | None:
        if may_skip:
            return None
        return torch.ones(length, length, dtype=torch.bool, device=query.device).tril().expand(batch, 1, -1, -1)

    mask = PrefillMask(layout, make, dtype=torch.bool, device=query.device)
    more: dict[str, Any] = {
        name: given for name, given in (("softcap", softcap), ("s_aux", sinks)) if given is not None
    }
    out, _ = _registered()(module_of(layer), query, key, value, mask, scaling=scale, **more)
    return out.contiguous()


@_prefill.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, value.shape[-1])
