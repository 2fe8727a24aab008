"""Sparse attention: one op over a SparseIndex, several backends.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

import math
from typing import Literal, overload

from torch import Tensor

import kernels.dispatch as dispatch
from kernels.backend import AttentionBackend
from kernels.checks import check
from kernels.index import SparseIndex

__all__ = ["launch", "sparse_attention"]


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
    block_table: Tensor | None = ...,
    sinks: Tensor | None = ...,
    out: Tensor | None = ...,
    skipped: Tensor | None = ...,
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
    block_table: Tensor | None = ...,
    sinks: Tensor | None = ...,
    out: Tensor | None = ...,
    skipped: Tensor | None = ...,
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
    block_table: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    skipped: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention over the keys that the index names (MInference 1.0, Algorithm 5).

    Args:
        q: (B, H, Q, D) queries, the last Q of the K positions; any strides with D contiguous.
        k: (B, G, K, D) keys; query head i reads KV head i // (H // G). With a block table (pages,
            page size, G, D). Keys and values are of q's dtype, or both float8_e4m3fn or
            float8_e5m2: a scale of the keys goes into `scale`, one of the values is the caller's to
            multiply the output by.
        v: (B, G, K, E) values. With a block table (pages, page size, G, E).
        index: SparseIndex for H heads and either B, Q and K or, if it is ragged, its own sequences.
        scale: factor on the logits; D ** -0.5 if None.
        softcap: logits become softcap * tanh(logits / softcap).
        return_lse: also return the natural log-sum-exp of each query's computed logits, its sink's
            included.
        block_table: (sequences, at least ceil(K / page size)) int32: the page that holds keys i *
            page size and on. A serving engine's cache is read where it lies.
        sinks: (H,) a learned logit of each query head that takes its share of every softmax and has
            no value (gpt-oss).
        out: (B, H, Q, E) of q's dtype to write to, E contiguous; allocated if None.
        skipped: (B or S, H) int32 contiguous, to which is added how many tiles each head skipped
            (SparseIndex.skip).
        backend: "auto" takes the fastest that serves the call; a name takes that one or raises.

    Returns:
        (B, H, Q, E) in q's dtype, a transposed view of a contiguous (B, Q, H, E); with return_lse
        also (B, H, Q) fp32. Rows of q that belong to no sequence of a ragged index get zeros and a
        log-sum-exp of -inf.

    Non-finite inputs: NaN or infinity in a query, a key or a value reaches exactly the outputs that
    depend on it.

    Raises:
        ValueError: shapes, dtypes, layouts or devices that do not go together; an index whose
            entries are not as SparseIndex.validate wants them; a scale or soft-cap that is not
            positive and finite; a named backend that cannot serve the call.
    """
    check(q, k, v, index, block_table, out, sinks, skipped)
    attended, lse = launch(
        q,
        k,
        v,
        index,
        scale=scale,
        softcap=softcap,
        block_table=block_table,
        sinks=sinks,
        out=out,
        skipped=skipped,
        backend=backend,
    )
    if return_lse:
        return attended, lse
    return attended


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: SparseIndex,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    block_table: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    skipped: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """sparse_attention and its log-sum-exp, for tensors and an index that are known to fit.

    Raises:
        ValueError: a scale or soft-cap that is not positive and finite; a named backend that cannot
            serve the call.
    """
    if scale is None:
        factor = q.shape[-1] ** -0.5
    else:
        factor = float(scale)
    for name, value in (("scale", factor), ("softcap", softcap)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive finite number, got {value}")

    def call(module: AttentionBackend) -> tuple[Tensor, Tensor]:
        return module.sparse_attention(
            q,
            k,
            v,
            index,
            scale=factor,
            softcap=softcap,
            block_table=block_table,
            sinks=sinks,
            out=out,
            skipped=skipped,
        )

    return dispatch.serve(backend, call, q, k, v, sinks=sinks)
