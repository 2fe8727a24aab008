"""The one way to Headwise's kernels: patterns, every key, windows, padded batches, sinks, decode.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.attention import launch
from kernels.decode import cpu as native
from kernels.dense import dense_attention
from kernels.patterns import LayerPlan
from kernels.ragged import Ragged
from runtime.attention.calls import Call
from runtime.attention.layout import Launch
from runtime.attention.masks import starts_of
from runtime.attention.reasons import Verdict
from runtime.attention.state import Layer

# With fewer float32 keys torch's own attention is as fast a step of decode.
_MIN_KEYS_FLOAT32 = 256


def attend(
    call: Call,
    together: Launch,
    plan: LayerPlan | None,
    verdict: Verdict,
    *,
    window: int | None = None,
) -> Tensor:
    """(B, Q, H, E) of these of a call's sequences, zeros for other queries; no plan is every
    key."""
    key = call.key
    value = call.value
    if together.keys is not None:
        key = key[:, :, together.keys]
        value = value[:, :, together.keys]
    return attend_layer(
        *(call.layer, plan, call.query, key, value),
        scale=call.scale,
        softcap=call.softcap,
        sinks=call.sinks,
        verdict=verdict,
        window=window,
        ragged=together.ragged,
    ).transpose(1, 2)


def attend_layer(
    layer: Layer,
    plan: LayerPlan | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None = None,
    verdict: Verdict | None = None,
    window: int | None = None,
    ragged: Ragged | None = None,
    kv_heads: tuple[int, ...] | None = None,
) -> Tensor:
    """(B, H, Q, E) for queries (B, H, Q, D), the last of the keys: the index of every head, and
    attention over it.

    plan: the layer's, or None for every key. sinks: (H,). verdict: for calls like this one; None
    where nobody has asked and the settings' backend serves. kv_heads: those of the layer's that k
    and v hold, with the query heads that read them in q; None for all."""
    if verdict is None:
        if k.shape[:3] != v.shape[:3]:
            raise ValueError(
                f"keys and values do not go together: {tuple(k.shape)}, {tuple(v.shape)}"
            )
        verdict = Verdict(layer.settings.backend)
    how: dict[str, Any] = {
        "scale": scale,
        "softcap": softcap,
        "sinks": sinks,
        "backend": verdict.kernel,
    }
    if plan is None:
        return dense_attention(q, k, v, window=window, ragged=ragged, **how)[0]
    some = plan if kv_heads is None else plan.of(kv_heads)
    return launch(q, k, v, some.build(q, k, scale=scale, ragged=ragged), **how)[0]


def attend_step(call: Call) -> Tensor | None:
    """(B, Q, H, E) of a few queries behind all keys of their sequences, on the CPU; None where sdpa
    is to serve them.

    With one bfloat16 query and 256 keys or more, torch's attention on the CPU took 10 to 100 times
    as long."""
    q = call.query
    k = call.key
    v = call.value
    mask = call.mask
    if not call.layer.settings.steps or not q.is_cpu:
        return None
    k_len = k.shape[2]
    if k_len < _MIN_KEYS_FLOAT32 and q.dtype == torch.float32:
        return None
    # Of a window that is not full yet, or just so, every key is seen.
    if (window := call.window) is not None and k_len > window:
        return None
    if mask is None:
        # Several queries without a mask start at the first key; that is sdpa's.
        if q.shape[2] > 1:
            return None
        starts: Tensor | str | None = None
    else:
        # A layer whose cache is not as long as the others': sdpa refuses that mask, and the kernel
        # would not look.
        starts = starts_of(mask) if mask.shape[-1] == k_len else "the mask is for other keys"
    if isinstance(starts, str) or call.sinks is not None or call.special is not None:
        return None
    batch, heads, _, dim = q.shape
    fits = (
        k.shape[0] == batch
        and k.shape[3] == dim
        and k.shape[:3] == v.shape[:3]
        and not heads % k.shape[1]
    )
    if not fits or not k_len or native.supports(q, k, v) is not None:
        return None
    out, _, _ = native.decode_attention(
        *(q, k, v),
        tokens=None,
        starts=starts,
        ends=None,
        window=None,
        block_table=None,
        scores="none",
        scale=dim**-0.5 if call.scale is None else call.scale,
        softcap=call.softcap,
    )
    return out.transpose(1, 2)
