"""Gradients of dense attention on the CPU in native code: cpu.cpp, compiled at first use.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention import cpu as attention
from kernels.call import GradientCall
from kernels.copies import with_rows
from kernels.native import build


def supports(call: GradientCall) -> str | None:
    """The reason why this backend cannot serve the call; None where it can."""
    return attention.unsupported(call.q.device, call.q.dtype) or build.load()


def run(call: GradientCall, *, engine: str | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by q, k and v of a call; `engine` takes another than the fastest.

    float16 is computed in float32. bfloat16 multiplies in bfloat16 and adds in float32, except by
    the engine "float"."""
    tensors = (call.q, call.k, call.v, call.out, call.grad_out)
    q, k, v, out, grad_out = (with_rows(x.detach()) for x in tensors)
    # In the layout of the inputs, as autograd prefers; without overlaps.
    dq, dk, dv = (_like(x) for x in (q, k, v))
    torch.ops.headwise.attention_gradients(
        *(q, k, v, out, call.lse.detach().contiguous(), grad_out),
        *(call.window or 0, call.factor, call.softcap or 0.0, call.skip_below),
        *(engine or attention.engines(q.dtype)[0], dq, dk, dv),
    )
    return dq, dk, dv


def _like(x: Tensor) -> Tensor:
    gradient = torch.empty_like(x)
    if gradient.stride(-1) == 1:
        return gradient
    return torch.empty_like(x, memory_format=torch.contiguous_format)
