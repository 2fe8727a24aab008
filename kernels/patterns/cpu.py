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
from kernels.index import SparseIndex
from kernels.native import build
from kernels.patterns import block_sparse
from kernels.patterns.base import First, SelectCall, layout
from kernels.patterns.block_sparse import Lists, MeansCall, pooled
from kernels.patterns.last_queries import EstimateCall, Masses
from kernels.patterns.paged import Keys
from kernels.patterns.vertical_slash import Lines
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
        return _declined(call.q)

    @staticmethod
    def run(call: MeansCall) -> block_sparse.Means:
        """See MeansCall.run."""
        return pooled(call, _pool)


class Select:
    """The index of a layer."""

    @staticmethod
    def supports(call: SelectCall) -> str | None:
        """The reason why this backend cannot serve the call; None where it can."""
        if unknown := call.unknown(First, Lines, Lists):
            return unknown
        return unsupported(call.device, torch.float32) or build.load()

    @staticmethod
    def run(call: SelectCall) -> SparseIndex:
        """See SelectCall.run."""
        index, heads = layout(call)
        some = call.builder
        builders = {type(part.builder): part.builder for part in call.parts}
        lines = builders.get(Lines)
        lists = builders.get(Lists)
        read: list[Tensor | None] = [None] * 4
        reach = 0
        if isinstance(lines, Lines):
            read[:2] = lines.masses.vertical.contiguous(), lines.masses.slash().contiguous()
        if isinstance(lists, Lists):
            read[2:] = lists.queries.contiguous(), lists.keys.contiguous()
            reach = lists.reach
        columns, diagonals = zip(*(pattern.limits() for pattern, _, _ in heads), strict=True)
        torch.ops.headwise.select_index(
            *read,
            [int(isinstance(builder, Lines)) for _, builder, _ in heads],
            [place for _, _, place in heads],
            columns,
            diagonals,
            [width for _, width, _ in index.widths()],
            [getattr(pattern, "coverage", None) or 0.0 for pattern, _, _ in heads],
            *(some.k_len, index.first_row, reach, some.scale),
            *(index.diagonals, index.columns, index.tiles, index.offsets),
        )
        return index


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
            call.scores.contiguous(), call.width, *map(contiguous, (call.ends, call.counts))
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
