"""Dense attention: what a model had before an artifact was applied to it.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.calls import Call
from runtime.layers import eager_attention
from runtime.masks import PrefillMask


def attend_densely(call: Call) -> tuple[Tensor, Tensor | None]:
    """The call as the model would have had it served: (B, Q, H, E), and the weights where they were asked for."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    module, layer, q, k, v, mask, dropout, scale, more = call
    # sdpa returns no weights, refuses a soft-cap and silently forgets attention sinks.
    needs_eager = (
        (layer is not None and layer.settings.dense == "eager")
        or more.get("softcap") is not None
        or more.get("s_aux") is not None
        or call.wants_weights
    )
    eager = eager_attention(module) if needs_eager else None
    if eager is None:
        plain = mask.for_dense() if isinstance(mask, PrefillMask) else mask
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        result: tuple[Tensor, Tensor | None] = sdpa(module, q, k, v, plain, dropout=dropout, scaling=scale, **more)
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
