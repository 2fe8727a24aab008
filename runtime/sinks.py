"""Sparse attention of layers with learned attention sinks: logits that take part in the softmax and have no value.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.attention import sparse_attention
from kernels.index import SparseIndex


def attend_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, index: SparseIndex, *, sinks: Tensor | None, **options: Any
) -> Tensor:
    """Attention over an index with one more logit a head, (H,), in each softmax: (B, H, Q, E); None: without."""
    if sinks is None:
        return sparse_attention(q, k, v, index, **options)
    return add_sinks(*sparse_attention(q, k, v, index, return_lse=True, **options), sinks)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Attention (B, H, Q, E) with log-sum-exp (B, H, Q), as it is with the sinks (H,) in the softmax; changes `out`.

    A sink has the share exp(sink) / (exp(sink) + exp(lse)) of a query's attention, and gives nothing for it.
    """
    return out.mul_(torch.sigmoid(lse - sinks.float()[:, None])[..., None])
