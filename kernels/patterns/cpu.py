"""Native code of the builders on the CPU: cpu.cpp, compiled at first use.

In torch each of these is a dozen operations over K columns, and every one waits for all threads.

Shapes: B batch, H query heads, h heads of one kind, G KV heads, Q query length, K key length, D
head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention.cpu import engines, unsupported
from kernels.copies import contiguous, with_rows
from kernels.native import build
from kernels.patterns.block_sparse import MeansCall, TilesCall, pooled
from kernels.patterns.last_queries import EstimateCall, Masses
from kernels.patterns.paged import Keys
from kernels.topk import TopKCall


def _declined(x: Keys) -> str | None:
    return unsupported(x.device, x.dtype) or build.load()


class Estimate:
    """Attention of the last queries."""

    @staticmethod
    def supports(call: EstimateCall) -> str | None:
        """The reason why this backend cannot serve the call; None where it can."""
        return _declined(call.q)

    @staticmethod
    def run(call: EstimateCall) -> Masses:
        """See kernels.patterns.last_queries.estimate."""
        masses: tuple[Tensor, Tensor] = torch.ops.headwise.vertical_slash_estimate(
            with_rows(call.q),
            *_where(call.k),
            call.heads,
            call.last_q,
            call.scale,
            call.window or 0,
            engines(call.q.dtype)[0],
        )
        return Masses(*masses)


class Means:
    """Means over tiles."""

    @staticmethod
    def supports(call: MeansCall) -> str | None:
        """The reason why this backend cannot serve the call; None where it can."""
        return _declined(call.x)

    @staticmethod
    def run(call: MeansCall) -> Tensor:
        """See kernels.patterns.block_sparse.MeansCall.run."""
        return pooled(call, _pool)


class Tiles:
    """Selection of tiles by their means."""

    @staticmethod
    def supports(call: TilesCall) -> str | None:
        """The reason why this backend cannot serve the call; None where it can."""
        return _declined(call.queries)

    @staticmethod
    def run(call: TilesCall) -> Tensor:
        """See kernels.patterns.block_sparse.TilesCall."""
        tiles: Tensor = torch.ops.headwise.best_tiles(
            call.queries.contiguous(),
            call.keys.contiguous(),
            call.blocks,
            [share or 0.0 for share in call.coverage],
            *(call.offsets, call.first, call.reach, call.scale, call.total),
        )
        return tiles


class TopK:
    """Top-k of each row."""

    @staticmethod
    def supports(call: TopKCall) -> str | None:
        """The reason why this backend cannot serve the call; None where it can."""
        return _declined(call.scores)

    @staticmethod
    def run(call: TopKCall) -> Tensor:
        """See kernels.topk.TopKCall.run."""
        places: Tensor = torch.ops.headwise.top_k_indices(
            call.scores.contiguous(),
            call.sizes,
            [share or 0.0 for share in call.coverage],
            call.forced,
            *map(contiguous, (call.ends, call.counts)),
        )
        return places


def _pool(x: Keys, lead: int) -> Tensor:
    """Mean over each tile, fp32 (B, heads, tiles, D); of the first `lead` positions miss."""
    means: Tensor = torch.ops.headwise.mean_pool(*_where(x), lead)
    return means


def _where(k: Keys) -> tuple[Tensor, Tensor | None, int]:
    """Keys as operators take them: tensor or cache, block table, and their number."""
    if isinstance(k, Tensor):
        return with_rows(k), None, k.shape[2]
    return k.cache, k.table.contiguous(), k.k_len
