"""Rows of a layer's attention and what pictures need of them, in chunks: never S x S.

Shapes: H query heads, G KV heads, S prompt length, D head dim, n queries, P pooled cells, R query
tiles, N key tiles; batch 1. For layers that see every key.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.index import TILE, SparseIndex, num_tiles
from kernels.logits import softmax, wide
from profiling.inside.capture import LayerInputs

# Scores held at a time: 64 MiB in fp32.
_SCORES = 1 << 24


def rows(inputs: LayerInputs, head: int, queries: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield chunks of queries with their attention (n, S) fp32; with sinks, rows sum below 1."""
    length = inputs.q.shape[2]
    group = inputs.q.shape[1] // inputs.k.shape[1]
    keys = wide(inputs.k[0, head // group])
    sinks = inputs.logits.sinks
    position = torch.arange(length, device=keys.device)
    for piece in queries.split(max(1, _SCORES // length)):
        scores = inputs.logits.compute(inputs.q[0, head, piece], keys, position <= piece[:, None])
        yield piece, softmax(scores, None if sinks is None else sinks[head])[0]


def pooled_map(inputs: LayerInputs, head: int, cell: int) -> Tensor:
    """Pool attention by cells of `cell` queries and keys, (P, P) fp32: mean mass per query."""
    length = inputs.q.shape[2]
    size = -(-length // cell)
    pooled = torch.zeros(size, size, device=inputs.q.device, dtype=torch.float32)
    for queries, attention in rows(inputs, head, torch.arange(length, device=inputs.q.device)):
        pooled.index_add_(0, queries // cell, by_cell(attention, size, cell))
    counts = torch.full((size,), cell, device=pooled.device, dtype=torch.float32)
    counts[-1] = length - (size - 1) * cell
    return pooled / counts[:, None]


def cover(index: SparseIndex, head: int, cell: int) -> Tensor:
    """Compute the fraction of each cell that an index computes, (P, P) fp32.

    A cell is `cell` queries and keys, a multiple of TILE.

    Counted in tiles; one that the causal limit cuts is a whole one.
    """
    n = num_tiles(index.k_len)
    per = cell // TILE
    size = -(-n // per)
    columns = index.columns[0, head]
    real = columns[columns < index.k_len].long()
    of_columns = torch.bincount(real // TILE, minlength=n).float() / TILE
    computed, could = (
        torch.zeros(size, size, device=columns.device, dtype=torch.float32) for _ in range(2)
    )
    tile = torch.arange(n, device=columns.device)
    for chunk, mask in index.row_masks():
        at = torch.arange(chunk.start, chunk.stop, device=columns.device)
        share = torch.where(mask[0, head], 1.0, of_columns * (tile < at[:, None]))
        computed.index_add_(0, at // per, by_cell(share, size, per))
        could.index_add_(0, at // per, by_cell((tile <= at[:, None]).float(), size, per))
    return computed / could.clamp_min(1)


def by_cell(values: Tensor, size: int, cell: int) -> Tensor:
    """Sums of `cell` columns at a time, (n, size) from (n, at most size x cell)."""
    wide = torch.nn.functional.pad(values, (0, size * cell - values.shape[1]))
    return wide.unflatten(1, (size, cell)).sum(2)
