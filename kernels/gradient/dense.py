"""Dense causal attention that autograd can differentiate, by Headwise's own kernels both ways.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernels.attention import sparse_attention
from kernels.gradient import attention_gradients, check_numbers, reference
from kernels.patterns.dense import dense_index


class DenseAttention(torch.autograd.Function):
    """See `dense_attention`; q, k, v, scale, softcap, window, skip_below."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        softcap: float | None,
        window: int | None,
        skip_below: float,
    ) -> Tensor:
        if q.dtype == torch.float64:
            out, lse = reference.dense_attention(
                q, k, v, scale=scale, softcap=softcap, window=window
            )
        else:
            index = dense_index(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.device)
            index = replace(index, window=window)
            out, lse = sparse_attention(
                q, k, v, index, scale=scale, softcap=softcap, return_lse=True
            )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how = {"scale": scale, "softcap": softcap, "window": window, "skip_below": skip_below}
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "dense attention can be differentiated once: create_graph must be False"
            )
        q, k, v, out, lse = ctx.saved_tensors
        found = attention_gradients(q, k, v, out, lse, grad_out.to(q.dtype), **ctx.how)
        return *found, None, None, None, None


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    skip_below: float = 0.0,
) -> Tensor:
    """Dense causal attention with a backward pass: (B, H, Q, E); see attention_gradients.

    Memory is linear in the lengths, both ways. It can be differentiated once.

    Raises:
        RuntimeError: in its backward pass, where that is to be differentiated again. ValueError: as
            kernels.attention.sparse_attention and kernels.gradient.attention_gradients do.
    """
    if scale is None:
        scale = q.shape[-1] ** -0.5
    else:
        scale = float(scale)
    check_numbers(scale, softcap, window, skip_below)
    out: Tensor = DenseAttention.apply(q, k, v, scale, softcap, window, skip_below)
    return out
