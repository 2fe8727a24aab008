"""How much attention an index keeps, estimated from the last queries, and the index with whole heads made dense.

Shapes: B batch, S sequences, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim, L last
queries, N key tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention import sparse_attention
from kernels.index import PAD, TILE, SparseIndex, num_rows, num_tiles


@torch.no_grad()
def estimate_recall(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: SparseIndex,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    last: int = TILE,
    backend: str = "auto",
) -> Tensor:
    """Attention mass of the last queries on the keys that each head's index keeps, their mean: (B or S, H) fp32.

    Exact for these queries: the log-sum-exp over the keys kept against that over all keys, from two calls of the
    attention that serves the prompt, over `last` queries each. The index's dense tail is left out, for it keeps
    everything where it applies and says nothing of the rows before. Nothing waits for the device.

    Args:
        q, k, v, index, scale, softcap, backend: as for kernels.attention.sparse_attention.
        last: how many queries; all of a sequence's where it has no more.

    Raises:
        ValueError: `last` is not positive, or what sparse_attention refuses.
    """
    if last < 1:
        raise ValueError(f"last must be at least 1, got {last}")
    ragged = index.ragged
    if ragged is None:
        return _uniform(q, k, v, index, scale, softcap, last, backend)
    found = []
    for s, (row, q_start, q_len, k_start, k_len) in enumerate(
        zip(ragged.rows, ragged.q_starts, ragged.q_lens, ragged.k_starts, ragged.k_lens, strict=True)
    ):
        one, queries, keys = slice(row, row + 1), slice(q_start, q_start + q_len), slice(k_start, k_start + k_len)
        parts = q[one, :, queries], k[one, :, keys], v[one, :, keys]
        found.append(_uniform(*parts, index.sequence(s), scale, softcap, last, backend))
    return torch.cat(found)


def _uniform(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: SparseIndex,
    scale: float | None,
    softcap: float | None,
    last: int,
    backend: str,
) -> Tensor:
    q_len = min(last, index.q_len)
    rows = num_rows(q_len, index.k_len)
    kept = index.changed(q_len=q_len, offsets=index.offsets[:, :, index.num_rows - rows :], dense_tail=())
    everything = kept.changed(dense_tail=(q_len,) * index.num_heads)
    masses = [
        sparse_attention(q[:, :, -q_len:], k, v, each, scale=scale, softcap=softcap, return_lse=True, backend=backend)[
            1
        ]
        for each in (kept, everything)
    ]
    return (masses[0] - masses[1]).exp_().clamp_max_(1).mean(-1)


def dense_where(index: SparseIndex, heads: Tensor) -> SparseIndex:
    """The index with every key computed for the heads (B or S, H) that are True. Nothing waits for a GPU."""
    if heads.device.type == "cpu" and not bool(heads.any()):
        return index
    n, width = num_tiles(index.k_len), index.diagonals.shape[-1]
    every = torch.arange(max(n, width), dtype=torch.int32, device=heads.device)
    own = torch.nn.functional.pad(index.diagonals, (0, max(n, width) - width), value=PAD)
    skip = None if index.skip is None else index.skip.masked_fill(heads, -torch.inf)
    return index.changed(diagonals=torch.where(heads[..., None], every, own), skip=skip)
