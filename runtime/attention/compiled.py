"""Attention inside a graph of torch.compile: decode is traced without a break, and a long prefill
is served as ever.

What is traced changes nothing of Python's: a counter that is part of a graph would have it compiled
again at each step. A prefill is one operator, which at run time does what is done without a
compiler. A graph hands on a mask as a plain tensor, so the operator reads off it which sequences it
is of.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from runtime.attention.calls import Call
from runtime.attention.layout import Layout
from runtime.attention.masks import PrefillMask
from runtime.attention.own import attend_as_before
from runtime.attention.reasons import NOT_OURS
from runtime.attention.state import MIN_QUERIES, Layer, layer_of, module_of
from runtime.standin import NewTokens

# Entries of a mask that are compared at once.
_AT_ONCE = 1 << 24
# What masks were found to say, as long as they are there: by window the layout, and the rows seen
# with it.
_layouts = WeakIdKeyDictionary()
# Rows by which a mask is known again.
_SOME = 16


def attend_traced(call: Call) -> tuple[Tensor, Tensor | None]:
    """The call as part of a graph: (B, Q, H, E), and the weights where they were asked for."""
    layer = call.layer
    query = call.query
    key = call.key
    if isinstance(key, NewTokens):
        return _uncompiled(call)
    if layer.settings.evicts and key.shape[2] != query.shape[2]:
        _say(layer.key, NOT_OURS)
    decode = layer.settings.decode
    if (
        decode is not None
        and layer.role is not None
        and layer.role.filters
        and decode.serves(query, key)
    ):
        _say(layer.key, "decode is being compiled: it attends to every token, not to chosen ones")
    if query.shape[2] < MIN_QUERIES or key.shape[2] < _least(call, layer):
        return attend_as_before(call)
    # Without a mask queries start at the first key.
    if call.special is not None or (call.mask is None and query.shape[2] != key.shape[2]):
        if (
            call.special is not None
            and layer.plan is not None
            and key.shape[2] >= layer.settings.dense_below
        ):
            _refuse(layer.key, call.special)
        return attend_as_before(call)
    tensors = query, key, call.value, call.mask, call.sinks
    return _prefill(*tensors, layer.key, call.scale, call.softcap, call.window), None


def _least(call: Call, layer: Layer) -> int:
    """Keys from which on a kernel of ours may serve the layer."""
    settings = layer.settings
    window = call.window
    if window is not None:
        return window + 1 if settings.dense_kernels else sys.maxsize
    sparse = sys.maxsize if layer.plan is None else settings.dense_below
    return sparse if settings.kernel_from is None else min(sparse, settings.kernel_from)


def layout_of(mask: Tensor, window: int | None) -> Layout | None:
    """The sequences of a prompt's mask, (B, 1, Q, K) bool: padded on either side, causal, over a
    window.

    None where it says anything else, and where the first query is not at the first key.
    """
    _, _, q_len, k_len = mask.shape
    if mask.dtype != torch.bool or k_len < q_len:
        return None
    rows = mask[:, 0]
    place = torch.arange(k_len, device=mask.device)
    queries = place[:q_len]
    # A query sees itself where it is a token, and nothing else where it is a sequence's first.
    real = rows.diagonal(dim1=1, dim2=2)
    seen = rows.sum(-1)
    begins = real & (seen == 1)
    least = torch.where(begins, queries, -1).cummax(1).values
    if window is not None:
        least = torch.maximum(least, queries - window + 1)
    tokens = torch.nn.functional.pad(real, (0, k_len - q_len))
    # Padding's own rows: nobody reads what such a query sees, so that some masks say everything.
    tells = real | ((seen > 0) & (seen < k_len))
    step = max(_AT_ONCE // (len(rows) * k_len), 1)
    for some in (slice(first, first + step) for first in range(0, q_len, step)):
        expected = (
            (place >= least[:, some, None]) & (place <= queries[some, None]) & tokens[:, None]
        )
        if bool(((rows[:, some] != expected) & tells[:, some, None]).any()):
            return None
    ranges = []
    for is_real, is_first in zip(real.tolist(), begins.tolist(), strict=True):
        cuts = [
            at for at in range(q_len) if is_first[at] or is_real[at] != (at > 0 and is_real[at - 1])
        ]
        runs = [(begin, end) for begin, end in pairwise([*cuts, q_len]) if is_real[begin]]
        if len(runs) > 1 or not all(is_first[begin] for begin, _ in runs):
            return None
        ranges.append(runs[0] if runs else (0, 0))
    return Layout(0, q_len, k_len, tuple(ranges), window=window)


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
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? "
    "sinks, int layer, float? scale, "
    "float? softcap, int? window) -> Tensor",
    # What serves a call is decided when it is made: no replay of launches knows that.
    tags=(torch.Tag.cudagraph_unsafe,),
)
def _prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    layer: int,
    scale: float | None,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """(B, Q, H, E) of a prompt: query (B, H, Q, D), key (B, G, K, D), value (B, G, K, E), mask (B
    or 1, 1, Q, K).

    sinks (H,): see kernels.attention.sparse_attention.
    """
    given = {"softcap": softcap, "s_aux": sinks, "sliding_window": window}
    more = {name: each for name, each in given.items() if each is not None}
    told = _told(query, mask, window)
    out, _ = _registered()(module_of(layer), query, key, value, told, scaling=scale, **more)
    return out.contiguous()


@_prefill.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, value.shape[-1])


def _told(query: Tensor, mask: Tensor | None, window: int | None) -> Tensor:
    """The mask of a call as one that says of which sequences it is, where it is of such."""
    batch = query.shape[0]
    length = query.shape[2]
    layout: Layout | None = Layout(0, length, length, ((0, length),) * batch, window=window)
    if mask is not None:
        layout = _read_off(mask, batch, window)
    if layout is None:
        assert mask is not None
        return mask

    def make(may_skip: bool) -> Tensor | None:
        if may_skip and layout.needs_no_mask:
            return None
        if mask is not None:
            return mask.expand(batch, -1, -1, -1)[:, :, :length]
        place = torch.arange(length, device=query.device)
        seen = place <= place[:, None]
        if window is not None:
            seen &= place > place[:, None] - window
        return seen.expand(batch, 1, -1, -1)

    return PrefillMask(layout, make, dtype=torch.bool, device=query.device)


def _read_off(mask: Tensor, batch: int, window: int | None) -> Layout | None:
    """layout_of(mask), found out once for all layers; again where some rows show that the tensor
    holds another mask."""
    rows = mask[:, :, :: max(mask.shape[2] // _SOME, 1)]
    known = _layouts.setdefault(mask, {})
    if window not in known or not torch.equal(known[window][1], rows):
        known[window] = layout_of(mask.expand(batch, -1, -1, -1), window), rows.clone()
    layout: Layout | None = known[window][0]
    return layout
