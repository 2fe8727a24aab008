"""Block-sparse: the key tiles nearest in the mean to each query tile (MInference 1.0, Algorithm 3).

Shapes: B batch, h heads of this kind, R query tiles, N key tiles, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from kernels import registry
from kernels.copies import on_device
from kernels.index import PAD, TILE, num_tiles
from kernels.patterns.base import SHARE, Builder, Entries, Inputs, Pattern
from kernels.patterns.paged import Keys, of_heads, part
from kernels.topk import best

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
        means = MeansCall(inputs.q, inputs.k, inputs.heads).run()
        return Lists.read(inputs, queries=means.queries, keys=means.keys)


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

    def entries(self, place: int, pattern: BlockSparse) -> Entries:
        """See Builder.entries."""
        tile = torch.arange(num_tiles(self.k_len), device=self.device)
        own = (
            torch.arange(self.rows, device=self.device)[:, None] + (self.k_len - self.q_len) // TILE
        )
        seen = (tile < own) & (tile >= own - self.reach)
        products = self.queries[:, place] @ self.keys[:, place].transpose(1, 2)
        if pattern.coverage is not None:
            logits = (products * self.scale).masked_fill(~(seen | (tile == own)), float("-inf"))
            products = logits.softmax(dim=-1)
        # The own tile comes first: it is always among the best, and its mass counts.
        scores = torch.cat(
            [
                products.gather(-1, own.expand(self.batch, -1, 1)),
                products.masked_fill(~seen, float("-inf")),
            ],
            dim=-1,
        )
        # With the first tile of all.
        places = best(scores, max(pattern.blocks, 2), coverage=pattern.coverage, forced=2)[..., 1:]
        none = torch.zeros(self.batch, 0, dtype=torch.int32, device=self.device)
        diagonal = torch.zeros(self.batch, 1, dtype=torch.int32, device=self.device)
        return Entries(diagonal, none, torch.where(places < PAD, places - 1, PAD))


class Means(NamedTuple):
    """Means over tiles of positions, fp32."""

    queries: Tensor
    keys: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class MeansCall:
    """Means over tiles of positions of the queries of some heads, and of the keys that they read.

    Attributes:
        q: (B, H, Q, D), the last Q of the K positions.
        k: (B, G, K, D) keys, or pages that hold them; query head i reads KV head i // (H // G).
        heads: the h query heads asked for.
    """

    q: Tensor
    k: Keys
    heads: Sequence[int]

    @property
    def device(self) -> torch.device:
        """Device of the queries."""
        return self.q.device

    @property
    def kv_heads(self) -> list[int]:
        """KV head of each of the heads."""
        group = self.q.shape[1] // self.k.shape[1]
        return [head // group for head in self.heads]

    @property
    def lead(self) -> int:
        """Positions of the first tile of queries that are missing."""
        return (self.k.shape[2] - self.q.shape[2]) % TILE

    def run(self, backend: str = "auto") -> Means:
        """Means of queries (B, h, R, D) and keys (B, h, N, D); the reference is torch."""
        means: Means = registry.run("means", self, backend)
        return means


def pooled(call: MeansCall, pool: Callable[[Keys, int], Tensor]) -> Means:
    """Means by a function of neighbouring heads and the positions that are missing."""
    return Means(
        _of_heads(call.q, call.heads, call.lead, pool), _of_heads(call.k, call.kv_heads, 0, pool)
    )


def _of_heads(
    x: Keys, heads: Sequence[int], lead: int, pool: Callable[[Keys, int], Tensor]
) -> Tensor:
    low = min(heads)
    high = max(heads) + 1
    means = pool(of_heads(x, slice(low, high)), lead)
    if list(heads) == list(range(low, high)):
        return means
    places = tuple(head - low for head in heads)
    return means.index_select(1, on_device(places, means.device))


class ReferenceMeans:
    """Means in torch, on any device."""

    @staticmethod
    def supports(call: MeansCall) -> str | None:
        """The reason why this backend cannot serve the call: always None."""
        return None

    @staticmethod
    def run(call: MeansCall) -> Means:
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
