"""Block-sparse: the key tiles nearest in the mean to each query tile (MInference 1.0, Algorithm 3).

Shapes: B batch, h heads of this kind, R query tiles, N key tiles, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from kernels import registry
from kernels.copies import on_device
from kernels.index import PAD, TILE, SparseIndex, empty_entries, num_tiles
from kernels.patterns.base import SHARE, Builder, Inputs, Pattern
from kernels.patterns.paged import Keys, of_heads, part
from kernels.topk import TopKCall, csr_offsets, scatter_rows

# Bytes of fp32 numbers held at once: on a GPU little compared with 1M tokens, on a CPU the size of
# its caches.
_SCRATCH_BYTES = {"cpu": 1 << 22}
_SCRATCH_BYTES_ELSEWHERE = 1 << 28


@dataclass(frozen=True, kw_only=True)
class BlockSparse(Pattern):
    """For each query tile the `blocks` key tiles of the largest product of mean query and key.

    With a `coverage`, only the smallest set of tiles that holds this fraction of the attention
    between the means, still at most `blocks` (FlexPrefill, Lai 2025, Algorithm 4; XAttention, Xu
    2025, section 2.2). The query's own tile and the first tile are always among them, so that 1 and
    2 blocks are the same.
    """

    kind: ClassVar[str] = "block_sparse"
    growing: ClassVar[tuple[str, ...]] = ("blocks",)

    blocks: int
    coverage: float | None = field(default=None, metadata=SHARE)

    def limits(self) -> tuple[int, int]:
        """See Pattern.limits."""
        return 0, 1

    @classmethod
    def prepare(cls, largest: Sequence[Self], inputs: Inputs) -> Builder:
        """See Pattern.prepare."""
        heads, q, k, _, _ = inputs
        return Lists.read(
            inputs,
            queries=MeansCall(q, heads, lead=(k.shape[2] - q.shape[2]) % TILE).run(),
            keys=MeansCall(k, [head // (q.shape[1] // k.shape[1]) for head in heads], lead=0).run(),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Lists(Builder):
    """A builder of each row's best tiles by mean queries (B, h, R, D) and keys (B, h, N, D)."""

    queries: Tensor
    keys: Tensor

    @property
    def reach(self) -> int:
        """Number of tiles before its own that a row sees."""
        before = num_tiles(self.k_len) - 1
        if self.window is None:
            return before
        return min(num_tiles(self.window - 1), before)

    def widths(self, patterns: Sequence[BlockSparse]) -> tuple[tuple[int, int, int], ...]:
        """See Builder. A row does not list its own tile."""
        return tuple((1, min(max(p.blocks, 2) - 1, self.reach), 0) for p in patterns)

    def select(self, patterns: Sequence[BlockSparse], backend: str = "auto") -> SparseIndex:
        """See Builder."""
        widths = self.widths(patterns)
        shape = (self.batch, len(patterns))
        first = (self.k_len - self.q_len) // TILE
        sizes = tuple(width for _, width, _ in widths)
        offsets, total = csr_offsets(sizes, self.batch, self.rows, first, self.device)
        tiles: Tensor = registry.run(
            "tiles",
            TilesCall(
                self.queries,
                self.keys,
                blocks=[p.blocks for p in patterns],
                coverage=[p.coverage for p in patterns],
                offsets=offsets,
                first=first,
                reach=self.reach,
                scale=self.scale,
                total=total,
            ),
            backend,
        )
        return SparseIndex.built(
            widths=widths,
            q_len=self.q_len,
            k_len=self.k_len,
            diagonals=torch.zeros(*shape, 1, dtype=torch.int32, device=self.device),
            tiles=tiles,
            offsets=offsets,
            columns=empty_entries(*shape, 0, device=self.device),
        )


@dataclass(frozen=True, eq=False, slots=True)
class TilesCall:
    """A choice of the best key tiles before each row's own, by means of queries and keys.

    A backend returns the tiles, (total,) int32: of each row ascending and padded with PAD.

    Attributes:
        queries: (B, h, R, D) fp32 means; row r has key tile first + r.
        keys: (B, h, N, D) fp32 means.
        blocks: of each head, most tiles of a row, its own included.
        coverage: of each head, None or the fraction of the attention that its tiles hold.
        offsets: (B, h, R + 1) int64, where the lists lie; there is room for all that may be chosen.
        first: key tile of row 0.
        reach: how many tiles before its own a row sees.
        scale: factor on the logits.
        total: entries of all lists.
    """

    queries: Tensor
    keys: Tensor
    blocks: Sequence[int]
    coverage: Sequence[float | None]
    offsets: Tensor
    first: int
    reach: int
    scale: float
    total: int

    @property
    def device(self) -> torch.device:
        """Device of the queries."""
        return self.queries.device


class ReferenceTiles:
    """The choice of tiles in torch, on any device."""

    @staticmethod
    def supports(call: TilesCall) -> str | None:
        """The reason why this backend cannot serve the call: always None."""
        return None

    @staticmethod
    def run(call: TilesCall) -> Tensor:
        """See TilesCall."""
        queries = call.queries
        (batch, heads, rows, _) = queries.shape
        n = call.keys.shape[2]
        first = call.first
        reach = call.reach
        device = queries.device
        tiles = torch.empty(call.total + 1, dtype=torch.int32, device=device)
        for some in chunks(rows if call.total else 0, 4 * batch * heads * n, device):
            # No row of the chunk sees a tile outside these.
            seen = slice(max(first + some.start - reach, 0), first + some.stop)
            own = torch.arange(some.start, some.stop, device=device)[:, None] + (first - seen.start)
            best = _best_tiles(
                queries[:, :, some], call.keys[:, :, seen], own, reach, seen.start == 0, call
            )
            # Place 0 is the own tile, then come those that are seen.
            scatter_rows(
                tiles,
                call.offsets[:, :, some.start : some.stop + 1],
                torch.where(best < PAD, best + (seen.start - 1), PAD),
            )
        return tiles[: call.total]


def _best_tiles(
    queries: Tensor,
    keys: Tensor,
    own: Tensor,
    reach: int,
    from_first: bool,
    call: TilesCall,
) -> Tensor:
    """The best of the tiles `keys` for some rows, without their own: (B, h, rows, any width).

    They are counted from 1.

    Args:
        queries: (B, h, rows, D).
        keys: (B, h, tiles, D), a key for each tile.
        own: (rows, 1), the row's own among the tiles.
        reach: how many tiles before its own a row sees.
        from_first: True if these begin with the first tile of all.
        call: the call that these rows belong to.
    """
    tile = torch.arange(keys.shape[2], device=own.device)
    # The own tile comes first: it is always among the best, and its mass
    # counts.
    scores = torch.empty(
        *queries.shape[:3], keys.shape[2] + 1, dtype=torch.float32, device=own.device
    )
    products = scores.flatten(0, 1)[..., 1:]
    torch.bmm(queries.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), out=products)
    coverage = call.coverage
    if covered := tuple(head for head, share in enumerate(coverage) if share is not None):
        at = on_device(covered, own.device)
        unseen = (tile > own) | (tile < own - reach)
        logits = (
            scores[..., 1:].index_select(1, at).mul_(call.scale).masked_fill_(unseen, float("-inf"))
        )
        scores[..., 1:].index_copy_(1, at, logits.softmax(dim=-1))
    scores[..., :1] = scores[..., 1:].gather(-1, own.expand(*queries.shape[:3], 1))
    scores[..., 1:].masked_fill_((tile >= own) | (tile < own - reach), float("-inf"))
    sizes = [max(blocks, 2) for blocks in call.blocks]
    return TopKCall(scores, sizes, coverage, forced=1 + from_first).run()[..., 1:]


@dataclass(frozen=True, eq=False, slots=True)
class MeansCall:
    """Mean over each tile of positions of some heads of x.

    Attributes:
        lead: positions of the first tile that are missing.
    """

    x: Keys
    heads: Sequence[int]
    _: KW_ONLY
    lead: int

    @property
    def device(self) -> torch.device:
        """Device of `x`."""
        return self.x.device

    def run(self, backend: str = "auto") -> Tensor:
        """The means, fp32 (B, h, tiles, D); the reference is torch."""
        means: Tensor = registry.run("means", self, backend)
        return means


def pooled(call: MeansCall, pool: Callable[[Keys, int], Tensor]) -> Tensor:
    """Means by a function of neighbouring heads and the positions that are missing."""
    low = min(call.heads)
    high = max(call.heads) + 1
    means = pool(of_heads(call.x, slice(low, high)), call.lead)
    if list(call.heads) == list(range(low, high)):
        return means
    places = tuple(head - low for head in call.heads)
    return means.index_select(1, on_device(places, means.device))


class ReferenceMeans:
    """Means in torch, on any device."""

    @staticmethod
    def supports(call: MeansCall) -> str | None:
        """The reason why this backend cannot serve the call: always None."""
        return None

    @staticmethod
    def run(call: MeansCall) -> Tensor:
        """See MeansCall.run."""
        return pooled(call, _pool)


def _pool(x: Keys, lead: int) -> Tensor:
    cut = min((TILE - lead) % TILE, x.shape[2])
    tiles = (x.shape[2] - cut) // TILE
    some = chunks(tiles, 4 * TILE * x.shape[0] * x.shape[1] * x.shape[3], x.device)
    bounds = [(0, cut), *((cut + each.start * TILE, cut + each.stop * TILE) for each in some)]
    pieces = (
        part(x, *each) for each in (*bounds, (cut + tiles * TILE, x.shape[2])) if each[0] < each[1]
    )
    means = [
        piece.unflatten(2, (-1, min(TILE, piece.shape[2]))).mean(3, dtype=torch.float32)
        for piece in pieces
    ]
    if len(means) == 1:
        return means[0]
    return torch.cat(means, dim=2)


def chunks(count: int, nbytes: int, device: torch.device) -> Iterator[slice]:
    """`count` things of `nbytes` scratch memory each, as many at a time as there is room for."""
    step = max(1, _SCRATCH_BYTES.get(device.type, _SCRATCH_BYTES_ELSEWHERE) // nbytes)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))
