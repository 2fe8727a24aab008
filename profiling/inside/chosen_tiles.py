"""Attention over key tiles that are random, or chosen by their true attention mass.

Random ones say what a density is worth without any choice; those with the most attention mass are
the upper limit of choosing tiles, for they know all scores. All run on Headwise's kernel; every row
has its own tile and the first one.

Shapes: H query heads, G KV heads, S prompt length, D head dim, R tiles of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from artifacts import HeadwiseError
from kernels.attention import sparse_attention
from kernels.index import TILE, SparseIndex, lists, num_tiles, with_dense_tail
from kernels.topk import ascending

# Orders the tiles of each row, best first: (H, R, R) scores of key tiles from queries, keys, scale
# and layer.
Scores = Callable[[Tensor, Tensor, float, int], Tensor]


def random_scores(q: Tensor, k: Tensor, scale: float, layer: int, *, seed: int = 0) -> Tensor:
    """Order tiles at random by layer, head and row; the same for every prompt of a length."""
    rows = num_tiles(k.shape[2])
    generator = torch.Generator().manual_seed(seed * 1_000_003 + layer)
    return torch.rand(q.shape[1], rows, rows, generator=generator, dtype=torch.float32).to(q.device)


def mass_scores(q: Tensor, k: Tensor, scale: float, layer: int) -> Tensor:
    """Compute the fraction of attention that each row of query tiles spends on each key tile.

    Args:
        q: (1, H, S, D).
        k: (1, G, S, D).

    Returns:
        (H, R, R) fp32, whose causal part sums to 1 in each row.
    """
    rows = num_tiles(k.shape[2])
    mass = torch.zeros(q.shape[1], rows, rows, device=q.device, dtype=torch.float32)
    for row in range(rows):
        mass[:, row, : row + 1] = row_mass(q, k, scale, row)
    return mass


def row_mass(q: Tensor, k: Tensor, scale: float, row: int) -> Tensor:
    """Compute mass_scores of one row of query tiles: (H, row + 1)."""
    heads = q.shape[1]
    groups = k.shape[1]
    start = row * TILE
    stop = min((row + 1) * TILE, q.shape[2])
    keys = k[0, :, :stop].repeat_interleave(heads // groups, dim=0).float()
    scores = (q[0, :, start:stop].float() @ keys.transpose(1, 2)) * scale
    ahead = torch.arange(start, stop, device=q.device)[:, None] < torch.arange(
        stop, device=q.device
    )
    weights = scores.masked_fill(ahead, float("-inf")).softmax(-1).mean(1)
    padded = torch.nn.functional.pad(weights, (0, (row + 1) * TILE - stop))
    return padded.unflatten(1, (row + 1, TILE)).sum(-1)


def top_k_index(scores: Tensor, length: int, density: float, *, tail: int = 0) -> SparseIndex:
    """Keep the highest tiles of each row, `density` of its causal tiles; own and first included."""
    rows = scores.shape[1]
    seen = torch.arange(1, rows + 1, dtype=torch.float32, device=scores.device)
    return _index(
        scores,
        (density * seen).round().clamp(min=2).long()[None].expand(scores.shape[0], -1),
        length,
        tail,
    )


def top_p_index(scores: Tensor, length: int, mass: float, *, tail: int = 0) -> SparseIndex:
    """Keep the highest tiles of each row that together hold `mass` (Twilight, 2025)."""
    held = _first(scores).sort(-1, descending=True)
    shares = scores.gather(-1, held.indices).cumsum(-1)
    counts = (shares < mass).sum(-1) + 1
    return _index(scores, counts.clamp(min=2), length, tail)


def _first(scores: Tensor) -> Tensor:
    """Put a row's own tile and the first one before all others, and invisible ones last."""
    rows = scores.shape[1]
    at = torch.arange(rows, device=scores.device)
    kept = (at[:, None] == at) | (at == 0)
    return scores.masked_fill(kept, float("inf")).masked_fill(at[:, None] < at, float("-inf"))


def _index(scores: Tensor, counts: Tensor, length: int, tail: int) -> SparseIndex:
    """The first `counts` (H, R) tiles of each row by score."""
    heads, rows = scores.shape[:2]
    order = _first(scores).sort(-1, descending=True).indices
    at = torch.arange(rows, device=scores.device)
    taken = torch.zeros_like(scores, dtype=torch.bool).scatter_(
        -1, order, (at < counts[..., None]).contiguous()
    )
    taken &= at < at[:, None]
    tiles = ascending(taken, int(taken.sum(-1).max()))
    nothing = torch.zeros(1, heads, 0, dtype=torch.int32, device=scores.device)
    diagonal = torch.zeros(1, heads, 1, dtype=torch.int32, device=scores.device)
    index = SparseIndex(
        q_len=length, k_len=length, diagonals=diagonal, **lists(tiles[None]), columns=nothing
    )
    return with_dense_tail(index, tail)


def share_beside(density: float, length: int, tail: int) -> float:
    """Compute the density of rows before the `tail` dense queries for `density` over all."""
    causal = num_tiles(length) * (num_tiles(length) + 1) / 2
    first = max(0, length - tail) // TILE
    sparse = first * (first + 1) / 2
    if sparse:
        return min(1.0, max(0.01, (density * causal - (causal - sparse)) / sparse))
    return 1.0


def attend_to(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    layer: int,
    *,
    scores: Scores,
    share: float,
    by_mass: bool,
    tail: int,
) -> Tensor:
    """Attend (1, H, S, E) to `share` of the tiles, or to as many as hold that mass.

    Raises:
        HeadwiseError: a share that is none.
    """
    if not 0 < share <= 1:
        raise HeadwiseError(f"a share must be above 0 and at most 1, got {share}")
    build = top_p_index if by_mass else top_k_index
    index = build(scores(q, k, scale, layer), q.shape[2], share, tail=tail)
    return sparse_attention(q, k, v, index, scale=scale)
