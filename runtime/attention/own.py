"""Dense attention as the model had it before an artifact was applied: sdpa, eager, flash, flex.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from runtime.attention.calls import Call
from runtime.attention.masks import PrefillMask
from runtime.layers import eager_attention


class Before:
    """An attention module whose configuration names the attention from before: flash functions read that there."""

    def __init__(self, whole: Any, **changes: Any) -> None:
        self.__dict__.update(changes, _whole=whole)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    @classmethod
    def of(cls, module: nn.Module, name: str) -> Before:
        return cls(module, config=cls(module.config, _attn_implementation=name))


def attend_densely(call: Call) -> tuple[Tensor, Tensor | None]:
    """The call as the model would have had it served: (B, Q, H, E), and the weights where they were asked for."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    module, layer, q, k, v, mask, dropout, scale, more = call
    name = "sdpa" if layer is None else layer.settings.dense
    plain = mask.for_dense() if isinstance(mask, PrefillMask) else mask
    result: tuple[Tensor, Tensor | None]
    if name not in ("sdpa", "eager"):
        assert layer is not None
        return ALL_ATTENTION_FUNCTIONS[name](layer.before, q, k, v, plain, dropout=dropout, scaling=scale, **more)
    # sdpa returns no weights, refuses a soft-cap and silently forgets attention sinks.
    needs_eager = name == "eager" or call.softcap is not None or call.sinks is not None or call.wants_weights
    eager = eager_attention(module) if needs_eager else None
    if eager is None:
        result = ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, plain, dropout=dropout, scaling=scale, **more)
        return result
    plain = mask.read() if isinstance(mask, PrefillMask) else mask
    if plain is None and q.shape[2] > 1 and call.causal:
        # sdpa's meaning of no mask: queries start at the first key.
        plain = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()[None, None]
    if plain is not None and plain.dtype == torch.bool:
        zero = torch.zeros((), dtype=q.dtype, device=q.device)
        plain = torch.where(plain, zero, torch.finfo(q.dtype).min)
    result = eager(module, q, k, v, plain, dropout=dropout, scaling=scale, **more)
    return result


def causal_mask(q: Tensor, k: Tensor) -> Tensor | None:
    """(1, 1, Q, K) for queries that are the last Q of the keys; None where sdpa does without."""
    q_len, k_len = q.shape[2], k.shape[2]
    if q_len in (1, k_len):
        return None
    return torch.ones(q_len, k_len, dtype=torch.bool, device=q.device).tril(k_len - q_len)[None, None]
