"""Gradients of dense attention on the CPU in native code: cpu.cpp, compiled at first use.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention import cpu as attention
from kernels.copies import with_rows
from kernels.native import build

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def supports(q: Tensor) -> str | None:
    """The reason why this backend cannot serve the call; None where it can."""
    if q.device.type != "cpu":
        return f"it serves tensors on the CPU, not on {q.device.type}"
    if q.dtype not in _DTYPES:
        return f"it serves float32, float16 and bfloat16, not {q.dtype}"
    return build.load()


def attention_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
    skip_below: float,
    engine: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See kernels.gradient.attention_gradients; `engine` takes another than the fastest.

    float16 is computed in float32. bfloat16 multiplies in bfloat16 and adds in float32, except by
    the engine "float"."""
    q, k, v, out, grad_out = map(with_rows, (q, k, v, out, grad_out))
    # Laid out as what they are the gradients of, as autograd likes it; each has a place of its own
    # in memory.
    dq, dk, dv = (_like(x) for x in (q, k, v))
    torch.ops.headwise.attention_gradients(
        *(
            q.detach(),
            k.detach(),
            v.detach(),
            out.detach(),
            lse.detach().contiguous(),
            grad_out.detach(),
        ),
        *(
            window or 0,
            scale,
            softcap or 0.0,
            skip_below,
            engine or attention.engines(q.dtype)[0],
            dq,
            dk,
            dv,
        ),
    )
    return dq, dk, dv


def _like(x: Tensor) -> Tensor:
    made = torch.empty_like(x)
    if made.stride(-1) == 1:
        return made
    return torch.empty_like(x, memory_format=torch.contiguous_format)
