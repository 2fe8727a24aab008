"""Dense attention by torch's sdpa or by Headwise's kernel over every key, by a rule of the device.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import dispatch
from kernels.dense import dense_attention as every_key

# With fewer keys attention is a small part of a prefill, and what the model had serves.
LEAST = 1024


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    by: str = "auto",
) -> Tensor:
    """Causal attention to every key (or to a window's), by sdpa or Headwise's kernel: (B, H, Q, E).

    Args:
        q, k, v: (B, H, Q, D) queries, the last Q of the K positions, (B, G, K, D) keys, (B, G, K,
        E) values. scale, softcap: as in kernels.attention.sparse_attention. window: how many keys a
        query sees, itself included; None for all. by: "auto", by the rule of the device (see
        `faster`), or "kernel" or "sdpa".

    Raises:
        ValueError: shapes or dtypes that do not go together; `by` is unknown; a soft-cap is asked
        of sdpa.
    """
    if by not in ("auto", "kernel", "sdpa"):
        raise ValueError(f"by must be auto, kernel or sdpa, got {by!r}")
    if by == "auto":
        windowed = window is not None and dispatch.why_slow(q, k, v) is None
        by = "kernel" if softcap is not None or windowed else faster(q, k, v)
    if by == "kernel":
        return every_key(q, k, v, scale=scale, softcap=softcap, window=window)[0]
    if softcap is not None:
        raise ValueError("sdpa has no soft-cap: use by='kernel'")
    return sdpa(q, k, v, scale, window)


def faster(q: Tensor, k: Tensor, v: Tensor) -> str:
    """ "kernel" or "sdpa": what serves causal attention to every key of calls like this one.

    On a CPU the kernel. With AMX, in bfloat16, at 512 to 8,192 tokens it was 1.16 to 1.49 times as
    fast as sdpa at head dim 64, 1.06 to 1.24 times at 128, 0.93 to 1.15 times at 256; without AMX 2
    to 4 times. On a GPU sdpa, until a device has shown otherwise. Below LEAST keys, and where no
    fast kernel serves, it is sdpa."""
    ours = q.device.type == "cpu" and k.shape[2] >= LEAST and dispatch.why_slow(q, k, v) is None
    return "kernel" if ours else "sdpa"


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None = None) -> Tensor:
    """dense_attention by torch's scaled_dot_product_attention: on a GPU its cuDNN or flash,
    whichever it prefers."""
    q_len = q.shape[2]
    k_len = k.shape[2]
    group = q.shape[1] // k.shape[1]
    if q_len == k_len and window is None:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=q_len > 1, scale=scale, enable_gqa=group > 1
        )
    if window is None and _takes_flash(q, v):
        # Flash has no masks, but this one, of queries that are the last of the keys.
        from torch.nn.attention.bias import causal_lower_right

        last = causal_lower_right(q_len, k_len)
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, last, scale=scale, enable_gqa=group > 1
        )
    at = torch.arange(k_len, device=q.device)
    distance = at[k_len - q_len :, None] - at
    mask = (distance >= 0) & (distance < (k_len if window is None else window))
    k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def _takes_flash(q: Tensor, v: Tensor) -> bool:
    """Whether torch's flash attention serves these on their device."""
    return (
        q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and q.shape[3] == v.shape[3] <= 256
    )
