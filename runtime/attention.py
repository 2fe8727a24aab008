"""The attention function registered with transformers: decides for each call what serves it, and serves it.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernels import dispatch
from kernels.attention import sparse_attention
from kernels.ragged import Ragged
from runtime.layers import eager_attention
from runtime.masks import MIN_QUERIES, Layout, PrefillMask, headwise_mask, starts_of
from runtime.offload import on_device
from runtime.policies.kept import attend_kept
from runtime.policies.standin import NewTokens
from runtime.state import Layer, layer_of

ATTENTION_NAME = "headwise"


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
    if isinstance(key, NewTokens) and layer is not None:
        reason = _special(module, query, key, value, dropout, {**kwargs, "sliding_window": None})
        return attend_kept(layer, query, key.layer, attention_mask, scaling, kwargs.get("softcap"), reason), None
    dense = _Dense(module, layer, dropout, scaling, kwargs)
    if layer is None:
        return dense(query, key, value, attention_mask)
    if layer.role is not None:
        chosen = _chosen(module, layer, query, key, value, attention_mask, dropout, scaling, kwargs)
        if chosen is not None:
            return chosen.transpose(1, 2), None
    key, value = on_device(key), on_device(value)
    why = _why_dense(module, layer, query, key, value, attention_mask, dropout, kwargs)
    layer.settings.calls[why or "sparse"] += 1
    if why is not None:
        return dense(query, key, value, attention_mask)
    assert isinstance(attention_mask, PrefillMask)
    layout, softcap = attention_mask.tokens, kwargs.get("softcap")
    return _sparse(layer, layout, query, key, value, scaling, softcap, dense), None


def _chosen(
    module: nn.Module,
    layer: Layer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> Tensor | None:
    """(B, H, Q, E) by the decode section of the artifact; None where that does not serve the call."""
    settings, role, number = layer.settings, layer.role, layer.number
    decode = settings.decode
    assert decode is not None and role is not None
    starts = starts_of(mask)
    if isinstance(starts, str) or _special(module, query, key, value, dropout, kwargs) is not None:
        return None
    how: dict[str, Any] = {"starts": starts, "scale": scaling, "softcap": kwargs.get("softcap")}
    if decode.serves(query, key):
        out = decode.attend(number, role, query, key, value, **how)
        settings.calls["chosen"] += out is not None
        return out
    if query.shape[2] > 1:
        decode.after_prefill(role, query, key, **how)
    if not isinstance(mask, PrefillMask) or mask.tokens.ranges is None:
        return None
    if _no_kernel(settings.backend, query, key, value) is not None:
        return None
    firsts = [start for start, _ in mask.tokens.ranges]
    out = decode.attend_chunk(number, role, query, key, value, firsts, **how)
    settings.calls["sparse"] += out is not None
    return out


def _why_dense(
    module: nn.Module,
    layer: Layer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> str | None:
    """Why the call is not sparse, None where it is; refuses what should have been sparse and cannot."""
    if query.shape[2] == 1:
        return "decode"
    if layer.plan is None:
        return "layer left alone"
    settings = layer.settings
    if query.shape[2] < MIN_QUERIES or key.shape[2] < settings.dense_below:
        return "short"
    if isinstance(mask, PrefillMask) and mask.tokens.longest < settings.dense_below:
        return "short"
    reason = _reason(module, layer, query, key, value, mask, dropout, kwargs)
    if reason is not None:
        settings.refuse(reason)
    return reason


def _reason(
    module: nn.Module,
    layer: Layer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> str | None:
    assert layer.plan is not None
    if reason := _special(module, query, key, value, dropout, kwargs):
        return reason
    if not isinstance(mask, PrefillMask) or mask.tokens.ranges is None:
        return "the mask is not causal over contiguous tokens (packed, overlaid, with holes, or made by hand)"
    batch, _, q_len, k_len = mask.shape
    if (query.shape[0], query.shape[2], key.shape[2]) != (batch, q_len, k_len):
        return "the cache holds other keys than the mask is for"
    heads = (len(layer.plan.patterns), layer.plan.num_kv_heads)
    if (query.shape[1], key.shape[1]) != heads:
        found = (query.shape[1], key.shape[1])
        return f"the layer has {found} query and KV heads, the plan is for {heads}"
    return _no_kernel(layer.settings.backend, query, key, value)


def _special(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, dropout: float, kwargs: dict[str, Any]
) -> str | None:
    """What a call asks for that no kernel of ours does, None where it is plain causal attention."""
    if torch.compiler.is_compiling():
        return "the call is being compiled"
    if _causal(module, kwargs) is False:
        return "attention is not causal"
    if _wants_weights(module, kwargs):
        return "attention weights were asked for"
    if dropout:
        return "attention dropout is on (the model is in training mode)"
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return "gradients are required (use torch.no_grad or inference_mode)"
    for name, what in (("s_aux", "attention sinks"), ("position_bias", "a position bias")):
        if kwargs.get(name) is not None:
            return f"the layer uses {what}"
    if kwargs.get("sliding_window") is not None:
        return "the layer slides, and the artifact has patterns for it"
    if not query.dtype == key.dtype == value.dtype:
        return f"queries, keys and values differ in type: {query.dtype}, {key.dtype}, {value.dtype}"
    return None


def _no_kernel(backend: str, query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why no kernel serves the call. The reference always does, slower than dense: only where asked for."""
    if backend != "auto":
        reason = dispatch.backend(backend).supports(query, key, value)
        return reason and f"kernel {backend}: {reason}"
    reasons = dispatch.why_not(query, key, value)
    fast = {name: reason for name, reason in reasons.items() if name != "reference"}
    if None in fast.values():
        return None
    return "no fast kernel: " + "; ".join(f"{name}: {reason}" for name, reason in fast.items())


def _sparse(
    layer: Layer,
    layout: Layout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    softcap: float | None,
    dense: _Dense,
) -> Tensor:
    """(B, Q, H, E): all long sequences in one launch, short ones densely, zeros for padded queries."""
    assert layer.plan is not None and layout.ranges is not None
    settings, build = layer.settings, layer.plan.build
    attend = partial(sparse_attention, scale=scale, softcap=softcap, backend=settings.backend)
    parts = [_Part(b, start, end, layout.q_start) for b, (start, end) in enumerate(layout.ranges)]
    parts = [part for part in parts if part.q_len > 0]
    long = [part for part in parts if part.k_len >= settings.dense_below and part.q_len >= MIN_QUERIES]
    q_len = query.shape[2]
    if len(long) == query.shape[0] and {(part.k_start, part.q_len) for part in long} == {(long[0].k_start, q_len)}:
        keys = slice(long[0].k_start, long[0].k_start + long[0].k_len)
        k, v = key[:, :, keys], value[:, :, keys]
        return attend(query, k, v, build(query, k, scale=scale)).transpose(1, 2)
    if long:
        ragged = Ragged(
            rows=tuple(part.row for part in long),
            q_starts=tuple(part.q_start for part in long),
            q_lens=tuple(part.q_len for part in long),
            k_starts=tuple(part.k_start for part in long),
            k_lens=tuple(part.k_len for part in long),
        )
        out = attend(query, key, value, build(query, key, scale=scale, ragged=ragged)).transpose(1, 2)
    else:
        out = query.new_zeros(query.shape[0], q_len, query.shape[1], value.shape[-1])
    for part in parts:
        if part not in long:
            one = slice(part.row, part.row + 1)
            queries = slice(part.q_start, part.q_start + part.q_len)
            keys = slice(part.k_start, part.k_start + part.k_len)
            q, k, v = query[one, :, queries], key[one, :, keys], value[one, :, keys]
            out[one, queries] = dense(q, k, v, _causal_mask(q, k))[0]
    return out


class _Part(NamedTuple):
    """One sequence of a call: slots [k_start, end) of the cache, of which those from `first_query` on ask."""

    row: int
    k_start: int
    end: int
    first_query: int

    @property
    def k_len(self) -> int:
        return self.end - self.k_start

    @property
    def q_len(self) -> int:
        return self.end - max(self.k_start, self.first_query)

    @property
    def q_start(self) -> int:
        return max(self.k_start - self.first_query, 0)


class _Dense:
    """The attention that the model had before, with the arguments of one call."""

    def __init__(
        self,
        module: nn.Module,
        layer: Layer | None,
        dropout: float,
        scaling: float | None,
        kwargs: dict[str, Any],
    ) -> None:
        self._module = module
        self._eager = layer is not None and layer.settings.dense == "eager"
        self._arguments = {"dropout": dropout, "scaling": scaling, **kwargs}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        module, arguments = self._module, self._arguments
        # sdpa returns no weights, refuses a soft-cap and silently forgets attention sinks.
        needs_eager = (
            self._eager
            or arguments.get("softcap") is not None
            or arguments.get("s_aux") is not None
            or _wants_weights(module, arguments)
        )
        eager = eager_attention(module) if needs_eager else None
        if eager is None:
            plain = mask.for_dense() if isinstance(mask, PrefillMask) else mask
            result: tuple[Tensor, Tensor | None] = ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, plain, **arguments)
            return result
        plain = mask.read() if isinstance(mask, PrefillMask) else mask
        if plain is None and q.shape[2] > 1 and _causal(module, arguments):
            # sdpa's meaning of no mask: queries start at the first key.
            plain = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()[None, None]
        if plain is not None and plain.dtype == torch.bool:
            zero = torch.zeros((), dtype=q.dtype, device=q.device)
            plain = torch.where(plain, zero, torch.finfo(q.dtype).min)
        result = eager(module, q, k, v, plain, **arguments)
        return result


def _causal_mask(q: Tensor, k: Tensor) -> Tensor | None:
    """(1, 1, Q, K) for queries that are the last Q of the keys; None where sdpa does without."""
    q_len, k_len = q.shape[2], k.shape[2]
    if q_len in (1, k_len):
        return None
    return torch.ones(q_len, k_len, dtype=torch.bool, device=q.device).tril(k_len - q_len)[None, None]


def _causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    causal = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if causal is None else causal)


def _wants_weights(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    wanted = kwargs.get("output_attentions")
    if wanted is None:
        wanted = getattr(getattr(module, "config", None), "output_attentions", False)
    return bool(wanted)
