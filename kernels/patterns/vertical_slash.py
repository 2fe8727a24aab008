"""Vertical-slash: key columns and diagonals chosen at run time (MInference 1.0, Algorithms 2 and 4).

Shapes: B batch, h heads of this kind, L last queries, K key length, N key tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from kernels.index import PAD, TILE, SparseIndex, ascending, empty_entries, num_rows, num_tiles
from kernels.patterns.base import Pattern

# Bytes of fp32 attention rows held at once while estimating: bounds memory at 1M tokens.
_SCRATCH_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True)
class VerticalSlash(Pattern):
    """The `vertical` key columns and `slash` diagonals with the most attention from the last `last_q` queries.

    The first tile of columns and the first TILE diagonals are always among them and count towards both sizes.
    """

    kind: ClassVar[str] = "vertical_slash"

    vertical: int
    slash: int
    last_q: int = 64

    @classmethod
    def prepare(
        cls,
        largest: Sequence[Self],
        heads: Sequence[int],
        q: Tensor,
        k: Tensor,
        *,
        scale: float,
        window: int | None = None,
    ) -> Callable[[Sequence[Self]], SparseIndex]:
        """See Pattern.prepare."""
        ranking = rank(q, k, heads, [p.last_q for p in largest], scale=scale)
        q_len = q.shape[2]
        return lambda patterns: select(
            ranking, [p.vertical for p in patterns], [p.slash for p in patterns], q_len=q_len
        )


class Ranking(NamedTuple):
    """Columns and diagonals of each head from the most to the least attended, both (B, h, K) int64."""

    columns: Tensor
    diagonals: Tensor


def estimate(
    q: Tensor, k: Tensor, heads: Sequence[int], last_q: Sequence[int], *, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention mass of each column and each diagonal from the last queries (Algorithm 2, lines 1-6).

    Returns:
        vertical (B, h, K): mass on key j; slash (B, h, K): mass at distance s = query position - key position. fp32.
    """
    batch, num_heads, _, _ = q.shape
    group, k_len = num_heads // k.shape[1], k.shape[2]
    vertical = torch.empty(batch, len(heads), k_len, dtype=torch.float32, device=q.device)
    slash = torch.empty_like(vertical)
    step = max(1, _SCRATCH_BYTES // (4 * batch * max(last_q) * k_len))
    runs: dict[tuple[int, int], list[int]] = {}
    for at, head in enumerate(heads):
        runs.setdefault((head // group, last_q[at]), []).append(at)
    for (kv_head, asked), members in runs.items():
        last = min(asked, q.shape[2])
        keys = k[:, kv_head].transpose(1, 2)
        for start in range(0, len(members), step):
            some = members[start : start + step]
            # One KV head's query heads share a matrix product: K is read once and never repeated.
            queries = q[:, [heads[i] for i in some], -last:].flatten(1, 2)
            logits = torch.matmul(queries, keys).float().unflatten(1, (len(some), last)).mul_(scale)
            corner = torch.ones(last, last, dtype=torch.bool, device=q.device).triu(1)
            logits[..., -last:].masked_fill_(corner, float("-inf"))
            # Rows stand one further right each in a padded buffer, so that one strided view lines the diagonals up.
            padded = torch.zeros(batch, len(some), last, last + k_len, dtype=torch.float32, device=q.device)
            torch.softmax(logits, dim=-1, out=logits)
            padded[..., last:] = logits
            strides = (*padded.stride()[:2], last + k_len + 1, 1)
            lined_up = padded.as_strided((batch, len(some), last, k_len + 1), strides)
            vertical[:, some] = logits.sum(2)
            slash[:, some] = lined_up.sum(2)[..., 1:].flip(-1)
    return vertical, slash


def rank(q: Tensor, k: Tensor, heads: Sequence[int], last_q: Sequence[int], *, scale: float) -> Ranking:
    """Columns and diagonals in the order in which growing sizes take them in; ties go to the smaller position."""
    vertical, slash = estimate(q, k, heads, last_q, scale=scale)
    vertical[..., :TILE] = float("inf")
    slash[..., :TILE] = float("inf")
    return Ranking(*(x.argsort(dim=-1, descending=True, stable=True) for x in (vertical, slash)))


def select(ranking: Ranking, vertical: Sequence[int], slash: Sequence[int], *, q_len: int) -> SparseIndex:
    """The index of the best `vertical[i]` columns and `slash[i]` diagonals of each head i (Algorithm 4).

    A diagonal at distance s crosses the tiles at offsets floor(s / TILE) and ceil(s / TILE), in every row alike.
    """
    batch, heads, k_len = ranking.columns.shape
    device = ranking.columns.device
    n = num_tiles(k_len)
    columns = _best(ranking.columns, vertical).to(torch.int32).sort(dim=-1).values
    distance = _best(ranking.diagonals, slash)
    offsets = torch.zeros(batch, heads, n + 1, dtype=torch.bool, device=device)
    for rounding in (0, TILE - 1):
        offsets.scatter_(-1, ((distance + rounding) // TILE).clamp_max_(n), True)
    return SparseIndex(
        q_len=q_len,
        k_len=k_len,
        diagonals=ascending(offsets[..., :n], min(n, 2 * distance.shape[-1])),
        tiles=empty_entries(batch, heads, num_rows(q_len, k_len), 0, device=device),
        columns=columns.contiguous(),
    )


def _best(order: Tensor, sizes: Sequence[int]) -> Tensor:
    """The first sizes[head] entries of each head's order, at least a tile of them, padded: (B, h, max size) int64."""
    kept = [min(max(size, TILE), order.shape[-1]) for size in sizes]
    width = max(kept)
    limit = torch.tensor(kept, device=order.device)[:, None]
    place = torch.arange(width, device=order.device)
    return torch.where(place < limit, order[..., :width], PAD)
