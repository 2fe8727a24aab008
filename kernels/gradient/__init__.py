"""Gradients of dense attention, recomputed tile by tile from the log-sum-exp.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.backend import GradientBackend
from kernels.gradient import cpu, reference

__all__ = ["attention_gradients"]


def attention_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    skip_below: float = 0.0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a loss by q, k and v of dense causal attention, from its gradient by the output.

    No Q x K matrix is made (FlashAttention-2, Algorithm 2; Dao, 2023). The same bits in every run
    and for any number of threads.

    Args:
        q: (B, H, Q, D) queries, the last Q of the K positions.
        k: (B, G, K, D) keys; query head i reads KV head i // (H // G).
        v: (B, G, K, E) values.
        out: (B, H, Q, E) what attention put out.
        lse: (B, H, Q) natural log-sum-exp of each query's logits, as
            kernels.attention.sparse_attention returns it.
        grad_out: (B, H, Q, E) gradient of the loss by `out`.
        scale: factor on the logits; D ** -0.5 if None.
        softcap: logits become softcap * tanh(logits / softcap).
        window: a query sees itself and the window - 1 keys before it; None is all of them.
        skip_below: leave out tiles of 64 x 64 positions in which no probability reaches this, as if
            they were 0.
        backend: "cpu" is native code, "reference" torch on any device; "auto" takes the first that
            serves the call.

    Returns:
        dq, dk, dv with the shapes and dtypes of q, k and v.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together; a number out of its range; a
            named backend that cannot serve the call.
    """
    _check(q, k, v, out, lse, grad_out)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    else:
        scale = float(scale)
    _check_numbers(scale, softcap, window, skip_below)
    if backend not in ("auto", "cpu", "reference"):
        raise ValueError(f"unknown backend {backend!r}; known: auto, cpu, reference")
    if backend == "reference":
        reason = None
    else:
        reason = cpu.supports(q)
    if backend == "cpu" and reason:
        raise ValueError(f"backend 'cpu' cannot serve this call: {reason}")
    module: GradientBackend = cpu
    if backend == "reference" or reason:
        module = reference
    return module.attention_gradients(
        q,
        k,
        v,
        out,
        lse,
        grad_out,
        scale=scale,
        softcap=softcap,
        window=window,
        skip_below=skip_below,
    )


def _check_numbers(
    scale: float, softcap: float | None, window: int | None, skip_below: float
) -> None:
    """Raise ValueError, in one line with the value, where one is out of its range."""
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive finite number, got {value}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if not 0 <= skip_below < 1:
        raise ValueError(f"skip_below must be at least 0 and below 1, got {skip_below}")


def _check(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor) -> None:
    tensors = {"q": q, "k": k, "v": v, "out": out, "grad_out": grad_out}
    if any(x.dim() != 4 for x in tensors.values()):
        dims = ", ".join(f"{name} {x.dim()}-D" for name, x in tensors.items())
        raise ValueError(f"all but lse must be 4-D (B, heads, length, dim), got {dims}")
    found = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (tensors | {"lse": lse}).items())
    shape = (*q.shape[:3], v.shape[-1])
    if (
        k.shape[:3] != v.shape[:3]
        or (k.shape[0], k.shape[-1]) != (q.shape[0], q.shape[-1])
        or not tuple(out.shape) == tuple(grad_out.shape) == shape
        or lse.shape != q.shape[:3]
    ):
        raise ValueError(f"shapes do not go together: {found}")
    if not all(q.shape) or not all(v.shape):
        raise ValueError(f"every size must be positive, got {found}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads do not divide into {k.shape[1]} KV heads")
    if q.shape[2] > k.shape[2]:
        raise ValueError(
            f"queries are the last of the keys: got {q.shape[2]} queries and {k.shape[2]} keys"
        )
    if len(dtypes := {x.dtype for x in tensors.values()}) > 1 or not q.is_floating_point():
        raise ValueError(
            f"all but lse must share a floating dtype, got {', '.join(sorted(map(str, dtypes)))}"
        )
    wide = torch.promote_types(q.dtype, torch.float32)
    if lse.dtype not in (torch.float32, wide):
        raise ValueError(f"lse must be {wide}, got {lse.dtype}")
    if len(devices := {x.device for x in (*tensors.values(), lse)}) > 1:
        raise ValueError(
            f"all tensors of a call must share a device, got {', '.join(sorted(map(str, devices)))}"
        )
