"""Sparse attention: one op over a SparseIndex, several backends.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, overload

from torch import Tensor

import kernels.dispatch as dispatch
from kernels.index import TILE, SparseIndex
from kernels.patterns.dense import dense_index

__all__ = ["sparse_attention"]


@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: SparseIndex,
    *,
    scale: float | None = ...,
    softcap: float | None = ...,
    return_lse: Literal[False] = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: SparseIndex,
    *,
    scale: float | None = ...,
    softcap: float | None = ...,
    return_lse: Literal[True],
    backend: str = ...,
) -> tuple[Tensor, Tensor]: ...


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: SparseIndex,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention over the keys that the index names, softmax over those alone (MInference 1.0, Algorithm 5).

    Args:
        q: (B, H, Q, D) queries, the last Q of the K positions; any strides with D contiguous.
        k: (B, G, K, D) keys; query head i reads KV head i // (H // G).
        v: (B, G, K, E) values.
        index: SparseIndex for B, H, Q and K.
        scale: factor on the logits; D ** -0.5 if None.
        softcap: logits become softcap * tanh(logits / softcap).
        return_lse: also return the natural log-sum-exp of each query's computed logits.
        backend: "auto" takes the fastest that serves the call; a name takes that one or raises.

    Returns:
        (B, H, Q, E) in q's dtype, a transposed view of a contiguous (B, Q, H, E); with return_lse also (B, H, Q) fp32.

    Non-finite inputs: NaN in a query or a key makes NaN of exactly the outputs that depend on it. A value must be
    finite wherever it stands: a zero weight times NaN is NaN, so it may reach queries that do not see its key.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together; a scale or soft-cap that is
            not positive and finite; a named backend that cannot serve the call.
    """
    _check(q, k, v, index)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive finite number, got {value}")
    module = dispatch.choose(backend, q, k, v)
    out, lse = module.sparse_attention(q, k, v, replace(index, dense_rows=0), scale=scale, softcap=softcap)
    if index.dense_rows:
        # Few rows, many keys: a second small call is cheaper than making every backend walk two kinds of rows.
        tail = min(index.q_len, index.k_len - (index.first_row + index.num_rows - index.dense_rows) * TILE)
        whole = dense_index(index.batch, index.num_heads, tail, index.k_len, q.device)
        seen = module.sparse_attention(q[:, :, -tail:], k, v, whole, scale=scale, softcap=softcap)
        out[:, :, -tail:], lse[:, :, -tail:] = seen
    return (out, lse) if return_lse else out


def _check(q: Tensor, k: Tensor, v: Tensor, index: SparseIndex) -> None:
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"q, k and v must be 4-D (B, heads, length, dim), got {q.dim()}, {k.dim()}, {v.dim()}-D")
    batch, num_heads, q_len, head_dim = q.shape
    if k.shape[0] != batch or v.shape[:3] != k.shape[:3] or k.shape[-1] != head_dim:
        raise ValueError(f"shapes do not go together: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if not k.shape[1] or num_heads % k.shape[1]:
        raise ValueError(f"{num_heads} query heads do not divide into {k.shape[1]} KV heads")
    if not head_dim or not v.shape[-1]:
        raise ValueError(f"head dims must be positive, got {head_dim} and {v.shape[-1]}")
    if not 0 < q_len <= k.shape[2]:
        raise ValueError(f"query length must be between 1 and key length {k.shape[2]}, got {q_len}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"q, k and v must share a floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if len(devices := {q.device, k.device, v.device, index.diagonals.device}) > 1:
        raise ValueError(f"q, k, v and index must share a device, got {', '.join(sorted(map(str, devices)))}")
    expected = (batch, num_heads, q_len, k.shape[2])
    if (found := (index.batch, index.num_heads, index.q_len, index.k_len)) != expected:
        raise ValueError(f"index is for (B, H, Q, K) = {found}, the call has {expected}")
    index.check_shapes()
