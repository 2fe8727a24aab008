"""Dense attention: torch's sdpa or Headwise's kernel by a rule of the device, or the model's own.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import registry
from kernels.call import Operands
from kernels.dense import dense_attention
from kernels.logits import PLAIN, Logits
from runtime.attention.call import Call
from runtime.attention.layer import MIN_KEYS_DENSE
from runtime.attention.mask import PrefillMask
from runtime.layers import eager_attention


def fastest_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    logits: Logits = PLAIN,
    by: str = "auto",
) -> Tensor:
    """Causal attention to every key (or a window's), by sdpa or Headwise's kernel: (B, H, Q, E).

    Args:
        q: (B, H, Q, D) queries, the last Q of the K positions.
        k: (B, G, K, D) keys.
        v: (B, G, K, E) values.
        logits: scale, soft-cap, learned sinks and window.
        by: "auto", by the rule of the device (see `faster`), or "kernel" or "sdpa".

    Raises:
        ValueError: shapes or dtypes that do not go together; `by` is unknown; a soft-cap or sinks
            are asked of sdpa.
    """
    if by not in ("auto", "kernel", "sdpa"):
        raise ValueError(f"by must be auto, kernel or sdpa, got {by!r}")
    beyond_sdpa = logits.softcap is not None or logits.sinks is not None
    if by == "auto":
        by = faster(q, k, v)
        # sdpa computes every key under a window's mask.
        if beyond_sdpa or (logits.window is not None and _is_fast(q, k, v)):
            by = "kernel"
    if by == "kernel":
        return dense_attention(q, k, v, logits=logits)[0]
    if beyond_sdpa:
        raise ValueError("sdpa has neither a soft-cap nor sinks: use by='kernel'")
    return sdpa(q, k, v, logits.factor(q.shape[3]), logits.window)


def faster(q: Tensor, k: Tensor, v: Tensor) -> str:
    """The faster of "kernel" and "sdpa" for causal attention to every key of such calls.

    On a CPU the kernel, on a GPU sdpa (docs/served.md has the measurements). Below MIN_KEYS_DENSE
    keys, and where no fast kernel serves, it is sdpa.
    """
    if q.device.type != "cpu" or k.shape[2] < MIN_KEYS_DENSE:
        return "sdpa"
    return "kernel" if _is_fast(q, k, v) else "sdpa"


def _is_fast(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True where a kernel other than the reference serves."""
    return registry.fast("attention", Operands(q, k, v))[1] is None


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
    """fastest_dense by torch's scaled_dot_product_attention; on a GPU its cuDNN or flash."""
    attention = torch.nn.functional.scaled_dot_product_attention
    q_len = q.shape[2]
    k_len = k.shape[2]
    group = q.shape[1] // k.shape[1]
    if q_len == k_len and window is None:
        return attention(q, k, v, is_causal=q_len > 1, scale=scale, enable_gqa=group > 1)
    if window is None and _takes_flash(q, v):
        # Flash has no masks, but this one, of queries that are the last of the keys.
        from torch.nn.attention.bias import causal_lower_right

        last = causal_lower_right(q_len, k_len)
        return attention(q, k, v, last, scale=scale, enable_gqa=group > 1)
    at = torch.arange(k_len, device=q.device)
    distance = at[k_len - q_len :, None] - at
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    if group > 1:
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
    return attention(q, k, v, attn_mask=mask, scale=scale)


def _takes_flash(q: Tensor, v: Tensor) -> bool:
    """True where torch's flash attention serves these on their device."""
    half = q.dtype in (torch.float16, torch.bfloat16)
    return q.is_cuda and half and q.shape[3] == v.shape[3] <= 256


def default_attention(call: Call) -> tuple[Tensor, Tensor | None]:
    """The call by sdpa, or eager where the model uses that: (B, Q, H, E), weights or None."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    module = call.module
    q = call.query
    k = call.key
    v = call.value
    mask = call.mask
    options: dict[str, Any] = {"dropout": call.dropout, "scaling": call.logits.scale, **call.more}
    result: tuple[Tensor, Tensor | None]
    if needs_eager(call) or call.wants_weights:
        eager = eager_attention(module)
    else:
        eager = None
    # sdpa takes queries without a mask for the first of the keys. Here they are the last: a model
    # may have cut them.
    if mask is None and call.causal and q.shape[2] not in (1, k.shape[2]):
        mask = _causal_mask(q, k)
    if eager is None:
        if isinstance(mask, PrefillMask):
            mask = mask.for_dense()
        result = ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, mask, **options)
        return result
    if isinstance(mask, PrefillMask):
        mask = mask.read()
    if mask is None and q.shape[2] > 1 and call.causal:
        mask = _causal_mask(q, k)
    if mask is not None and mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=q.dtype, device=q.device)
        mask = torch.where(mask, zero, torch.finfo(q.dtype).min)
    result = eager(module, q, k, v, mask, **options)
    return result


def needs_eager(call: Call) -> bool:
    """True where sdpa does not compute a call: it refuses soft-caps, and forgets sinks silently."""
    logits = call.logits
    return (
        call.layer.settings.model_attention == "eager"
        or logits.softcap is not None
        or logits.sinks is not None
    )


def _causal_mask(q: Tensor, k: Tensor) -> Tensor:
    """Causal mask (1, 1, Q, K) of queries that are the last Q of the keys, as booleans."""
    q_len = q.shape[2]
    k_len = k.shape[2]
    seen = torch.ones(q_len, k_len, dtype=torch.bool, device=q.device)
    return seen.tril(k_len - q_len)[None, None]
