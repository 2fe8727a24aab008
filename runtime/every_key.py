"""A decode step over every key by Headwise's own kernel, where that is faster than sdpa: on the CPU.

With one bfloat16 query and 256 keys or more, torch's attention on the CPU took 10 to 100 times as long as this kernel.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.decode import MAX_QUERIES, decode_attention
from kernels.decode import cpu as native
from runtime.calls import Call
from runtime.masks import starts_of
from runtime.reasons import special

# In float32 and with fewer keys torch's own attention is as fast.
_MIN_KEYS_FLOAT32 = 256


def attend_to_every_key(call: Call) -> Tensor | None:
    """(B, Q, H, E) of a few queries behind all keys of their sequences; None where sdpa is to serve them."""
    layer, q, k, v, mask = call.layer, call.query, call.key, call.value, call.mask
    if layer is None or not layer.settings.dense_kernels or layer.settings.backend not in ("auto", "cpu"):
        return None
    if q.shape[2] > MAX_QUERIES or q.device.type != "cpu":
        return None
    if q.dtype == torch.float32 and k.shape[2] < _MIN_KEYS_FLOAT32:
        return None
    # Without a mask several queries start at the first key; that is sdpa's.
    if mask is None and q.shape[2] > 1:
        return None
    # Of a window that is not full yet, or just so, every key is seen.
    window = call.more.get("sliding_window")
    if window is not None:
        if k.shape[2] > window:
            return None
        call = call._replace(more={**call.more, "sliding_window": None})
    # A layer whose cache is not as long as the others': sdpa refuses that mask, and the kernel would not look at it.
    if mask is not None and mask.shape[-1] != k.shape[2]:
        return None
    starts = starts_of(mask)
    if isinstance(starts, str) or special(call) is not None or native.supports(q, k, v) is not None:
        return None
    done = decode_attention(q, k, v, starts=starts, scale=call.scale, softcap=call.softcap, backend="cpu")
    return done.out.transpose(1, 2)
