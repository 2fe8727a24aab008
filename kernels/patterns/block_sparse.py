"""Block-sparse: the key tiles nearest in the mean to each query tile (MInference 1.0, Algorithm 3).

Shapes: B batch, h heads of this kind, R query tiles, N key tiles, S means of a tile, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from kernels.breaker import CannotBuildError
from kernels.copies import on_device
from kernels.index import PAD, TILE, SparseIndex, empty_entries, num_tiles
from kernels.joining import cat_heads
from kernels.patterns import cpu, triton
from kernels.patterns.base import SHARE, Builder, Inputs, Pattern
from kernels.patterns.choose import best_places, offsets_of, put
from kernels.patterns.paged import Keys, of_heads, part

# Bytes of fp32 numbers held at once: on a GPU little beside 1M tokens, on a CPU what stays near its
# cores.
_SCRATCH_BYTES = {"cpu": 1 << 22}
_SCRATCH_BYTES_ELSEWHERE = 1 << 28

# Queries, and keys, whose mean stands for them; below TILE a tile has several means. By means of 8
# nothing certain is gained at the same cost (docs/results.md).
POOLS = (TILE, 16)


def _no_pool(value: object) -> str | None:
    """The reason why the value is no pool, None if it is one."""
    if type(value) is int and value in POOLS:
        return None
    return f"must be one of {', '.join(map(str, POOLS))}, got {value!r}"


@dataclass(frozen=True, kw_only=True)
class BlockSparse(Pattern):
    """For each query tile the `blocks` key tiles of the highest score.

    With a `pool` of 64 the score is the product of the mean query and the mean key. With one of 16
    both are means of 16 positions, counted from position 0; each mean query attends, by softmax, to
    the mean keys up to its own; and a tile's score is its mass, summed over all mean queries of the
    query tile.

    With a `coverage`, only the smallest set of tiles that holds this share of the attention between
    the means, still at most `blocks` (FlexPrefill, Lai 2025, Algorithm 4; XAttention, Xu 2025,
    section 2.2). The query's own tile and the first tile are always among them, so that 1 and 2
    blocks are the same."""

    kind: ClassVar[str] = "block_sparse"

    blocks: int
    coverage: float | None = field(default=None, metadata=SHARE)
    pool: int = field(default=TILE, metadata={"fault": _no_pool})

    @classmethod
    def prepare(cls, largest: Sequence[Self], inputs: Inputs) -> Builder:
        """See Pattern.prepare."""
        heads, q, k, scale, window = inputs
        q_len = q.shape[2]
        k_len = k.shape[2]
        device = q.device
        group = q.shape[1] // k.shape[1]
        places: dict[int, list[int]] = {}
        for place, pattern in enumerate(largest):
            places.setdefault(pattern.pool, []).append(place)
        order = [place for some in places.values() for place in some]
        back = sorted(range(len(order)), key=order.__getitem__)
        # The function holds the means, not queries and keys.
        means = {}
        for pool, some in places.items():
            mine = [heads[place] for place in some]
            means[pool] = (
                mean_of_tiles(q, mine, lead=(k_len - q_len) % TILE, pool=pool),
                mean_of_tiles(k, [head // group for head in mine], lead=0, pool=pool),
            )

        def build(patterns: Sequence[Self]) -> SparseIndex:
            parts = [
                select(
                    *means[pool],
                    [patterns[place] for place in some],
                    q_len=q_len,
                    k_len=k_len,
                    scale=scale,
                    window=window,
                )
                for pool, some in places.items()
            ]
            if len(parts) == 1:
                return parts[0]
            return cat_heads(parts, on_device(tuple(back), device), back)

        return build


def select(
    queries: Tensor,
    keys: Tensor,
    patterns: Sequence[BlockSparse],
    *,
    q_len: int,
    k_len: int,
    scale: float,
    window: int | None = None,
) -> SparseIndex:
    """The index of each row's best tiles by means of queries (B, h, R * S, D) and of keys.

    Keys are (B, h, N * S, D); all patterns have the same pool, TILE // S."""
    (batch, heads) = queries.shape[:2]
    parts = TILE // patterns[0].pool
    rows = queries.shape[2] // parts
    n = keys.shape[2] // parts
    device = queries.device
    first = (k_len - q_len) // TILE
    if window is None:
        reach = n - 1
    else:
        reach = min(num_tiles(window - 1), n - 1)
    # The own tile is not listed.
    most = tuple(min(max(p.blocks, 2) - 1, reach) for p in patterns)
    offsets, total = offsets_of(most, batch, rows, first, device)
    present = _present(parts, (k_len - q_len) % TILE, q_len)
    if cpu.serves(queries):
        blocks = [p.blocks for p in patterns]
        coverage = [p.coverage for p in patterns]
        tiles = cpu.best_tiles(
            queries,
            keys,
            blocks,
            coverage,
            offsets,
            first=first,
            reach=reach,
            scale=scale,
            total=total,
            parts=parts,
            present=present,
        )
    else:
        tiles = torch.empty(total + 1, dtype=torch.int32, device=device)
        scratch = 4 * batch * heads * n * parts**2
        for some in chunks(rows if total else 0, scratch, device):
            # No row of the chunk sees a tile outside these.
            seen = slice(max(first + some.start - reach, 0), first + some.stop)
            own = torch.arange(some.start, some.stop, device=device)[:, None] + (first - seen.start)
            tile = torch.arange(seen.stop - seen.start, device=device)
            if parts == 1:
                scores = _products(
                    queries[:, :, some], keys[:, :, seen], tile, own, reach, patterns, scale
                )
            else:
                scores = _masses(
                    queries,
                    keys,
                    some,
                    seen,
                    parts=parts,
                    present=present,
                    first=first,
                    reach=reach,
                    scale=scale,
                )
            best = _best_tiles(scores, tile, own, reach, seen.start == 0, patterns)
            # Place 0 is the own tile, then come those that are seen.
            put(
                tiles,
                offsets[:, :, some.start : some.stop + 1],
                torch.where(best < PAD, best + (seen.start - 1), PAD),
            )
    return SparseIndex.built(
        widths=tuple((1, width, 0) for width in most),
        q_len=q_len,
        k_len=k_len,
        diagonals=torch.zeros(batch, heads, 1, dtype=torch.int32, device=device),
        tiles=tiles[:total],
        offsets=offsets,
        columns=empty_entries(batch, heads, 0, device=device),
    )


def _present(parts: int, lead: int, q_len: int) -> range:
    """Means of the query tiles of which there is a query; the first tile lacks `lead` positions."""
    pool = TILE // parts
    return range(lead // pool, -(-(lead + q_len) // pool))


def _products(
    queries: Tensor,
    keys: Tensor,
    tile: Tensor,
    own: Tensor,
    reach: int,
    patterns: Sequence[BlockSparse],
    scale: float,
) -> Tensor:
    """Scores (B, h, rows, 1 + tiles) of single means: products, or masses for a coverage.

    tile: (tiles), their numbers from 0. own: (rows, 1), the row's own among them. Column 0 is left
    for it."""
    scores = torch.empty(
        *queries.shape[:3], keys.shape[2] + 1, dtype=torch.float32, device=own.device
    )
    products = scores.flatten(0, 1)[..., 1:]
    torch.bmm(queries.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), out=products)
    if covered := tuple(head for head, p in enumerate(patterns) if p.coverage is not None):
        at = on_device(covered, own.device)
        unseen = (tile > own) | (tile < own - reach)
        logits = scores[..., 1:].index_select(1, at).mul_(scale).masked_fill_(unseen, float("-inf"))
        scores[..., 1:].index_copy_(1, at, logits.softmax(dim=-1))
    return scores


def _masses(
    queries: Tensor,
    keys: Tensor,
    some: slice,
    seen: slice,
    *,
    parts: int,
    present: range,
    first: int,
    reach: int,
    scale: float,
) -> Tensor:
    """Scores (B, h, rows, 1 + tiles) of S means a tile: what a row's mean queries attend to.

    queries (B, h, R * S, D) and keys (B, h, N * S, D) are all means; `some` are the rows, `seen`
    the tiles that are wanted. present: the mean queries of which there are queries; others attend
    to nothing. first: the key tile of row 0. Column 0 is left for the row's own tile."""
    if triton.weighs(queries):
        # Where it turns out not to build, torch serves this call and those to come.
        with suppress(CannotBuildError):
            return triton.tile_masses(
                queries,
                keys,
                some,
                seen,
                parts=parts,
                present=present,
                first=first,
                reach=reach,
                scale=scale,
            )
    asked, held = (range(tiles.start * parts, tiles.stop * parts) for tiles in (some, seen))
    row = torch.arange(asked.start, asked.stop, device=queries.device)[:, None]
    block = torch.arange(held.start, held.stop, device=queries.device)
    # A mean query sees the mean keys up to its own place, in tiles within reach.
    own = first * parts + row
    unseen = (block > own) | (block // parts < own // parts - reach)
    logits = queries[:, :, asked.start : asked.stop] @ keys[:, :, held.start : held.stop].transpose(
        2, 3
    )
    weights = logits.mul_(scale).masked_fill_(unseen, float("-inf")).softmax(dim=-1)
    weights.masked_fill_((row < present.start) | (row >= present.stop), 0.0)
    masses = weights.unflatten(3, (-1, parts)).sum(4).unflatten(2, (-1, parts)).sum(3)
    return torch.nn.functional.pad(masses, (1, 0))


def _best_tiles(
    scores: Tensor,
    tile: Tensor,
    own: Tensor,
    reach: int,
    from_first: bool,
    patterns: Sequence[BlockSparse],
) -> Tensor:
    """The best tiles for some rows, without their own: (B, h, rows, any width).

    They are counted from 1. scores: (B, h, rows, 1 + tiles), of which column 0 is overwritten.
    tile: (tiles), their numbers from 0. own: (rows, 1), the row's own among them. from_first: True
    if these begin with the first tile of all."""
    # The own tile takes part in front of all others: it is always among the best, and its mass
    # counts.
    scores[..., :1] = scores[..., 1:].gather(-1, own.expand(*scores.shape[:3], 1))
    scores[..., 1:].masked_fill_((tile >= own) | (tile < own - reach), float("-inf"))
    blocks = [max(p.blocks, 2) for p in patterns]
    coverage = [p.coverage for p in patterns]
    return best_places(scores, blocks, coverage, forced=1 + from_first)[..., 1:]


def mean_of_tiles(x: Keys, heads: Sequence[int], *, lead: int, pool: int = TILE) -> Tensor:
    """Mean of each `pool` positions of some heads of x, fp32 (B, h, tiles * TILE // pool, D).

    `lead` positions of the first tile are missing. Zero where all positions of a mean are.
    """
    low = min(heads)
    high = max(heads) + 1
    if not cpu.serves(x) and triton.serves(x):
        # Where it turns out not to build, torch serves this call and those to come.
        with suppress(CannotBuildError):
            return triton.mean_of_tiles(x, heads, lead=lead, pool=pool)
    pooled = _pool_all(of_heads(x, slice(low, high)), lead=lead, pool=pool)
    if list(heads) == list(range(low, high)):
        return pooled
    return pooled.index_select(1, on_device(tuple(head - low for head in heads), pooled.device))


def _pool_all(x: Keys, *, lead: int, pool: int) -> Tensor:
    if cpu.serves(x):
        return cpu.mean_pool(x, lead=lead, pool=pool)
    count = num_tiles(lead + x.shape[2]) * (TILE // pool)
    before = lead // pool
    cut = min(-lead % pool, x.shape[2])
    whole = (x.shape[2] - cut) // pool
    some = chunks(whole, 4 * pool * x.shape[0] * x.shape[1] * x.shape[3], x.device)
    bounds = [(0, cut), *((cut + each.start * pool, cut + each.stop * pool) for each in some)]
    pieces = (
        part(x, *each) for each in (*bounds, (cut + whole * pool, x.shape[2])) if each[0] < each[1]
    )
    means = [
        piece.unflatten(2, (-1, min(pool, piece.shape[2]))).mean(3, dtype=torch.float32)
        for piece in pieces
    ]
    made = sum(each.shape[2] for each in means)
    if before or made + before < count:
        absent = means[0].new_zeros(*means[0].shape[:2], count - made, means[0].shape[3])
        means = [absent[:, :, :before], *means, absent[:, :, before:]]
    if len(means) == 1:
        return means[0]
    return torch.cat(means, dim=2)


def chunks(count: int, nbytes: int, device: torch.device) -> Iterator[slice]:
    """`count` things of `nbytes` scratch memory each, as many at a time as there is room for."""
    step = max(1, _SCRATCH_BYTES.get(device.type, _SCRATCH_BYTES_ELSEWHERE) // nbytes)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))
