"""Launches of the builders' Triton kernels (triton_kernels.py) on GPUs.

In torch the estimate writes the attention of the last queries out, four bytes a key for each of
them, and reads it again several times; here it stays on the chip.

Shapes: B batch, H query heads, h heads asked for, G KV heads, Q query length, K key length, D head
dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernels.attention.triton_launch import architecture, select_config, split, unavailable
from kernels.copies import on_device, with_rows
from kernels.index import TILE, SparseIndex, num_tiles
from kernels.patterns import block_sparse
from kernels.patterns.base import First, SelectCall, layout
from kernels.patterns.block_sparse import Lists, MeansCall, chunks
from kernels.patterns.last_queries import EstimateCall, Masses
from kernels.patterns.paged import Keys
from kernels.patterns.vertical_slash import Lines
from kernels.registry import build_failure
from kernels.topk import TopKCall
from kernels.triton_calls import KernelCall, or_placeholder, run_calls

_MODULE = f"{__package__}.triton_kernels"
_MEANS = f"{__package__}.triton_means_kernels"
_SELECT = f"{__package__}.triton_select_kernel"
_TOPK = f"{__package__}.triton_topk_kernel"
_LOG2E = 1.4426950408889634
_MAX_DIM = 256
# The widest heads of which two at a time fit the smaller shared memories.
_MOST_FOR_TWO = 128
# Programs that keep every GPU busy to the end, and chunks of keys whose sums are put together
# afterwards.
_PROGRAMS = 1024
_MOST_CHUNKS = 64
# Scores of a row that a program takes at a time.
_CHUNK = 4096


def _declined(x: Keys) -> str | None:
    """The reason why Triton does not read tensors or pages; None where it does."""
    if reason := unavailable(x.device):
        return reason
    if x.dtype not in (torch.float16, torch.bfloat16):
        return f"it builds indices in float16 and bfloat16, not in {x.dtype}"
    if x.shape[-1] > _MAX_DIM:
        return f"it builds indices for head dims up to {_MAX_DIM}, not {x.shape[-1]}"
    return build_failure("builders", str(x.device))


class Estimate:
    """Attention of the last queries. The order of sums is always the same."""

    @staticmethod
    def supports(call: EstimateCall) -> str | None:
        """The reason why this backend cannot serve the call; None where it can."""
        return _declined(call.q)

    @staticmethod
    def run(call: EstimateCall) -> Masses:
        """See kernels.patterns.last_queries.estimate."""
        q = call.q
        k_len = call.k.shape[2]
        how = plan(call)
        shape = (q.shape[0], len(call.heads))
        distances = how.arguments["tiles"] * TILE
        partial = torch.empty(
            *shape, how.blocks * TILE, how.chunks, dtype=torch.float32, device=q.device
        )
        launch(how.normalisers(partial), q.device)
        # Nobody writes to keys that no query sees.
        new = torch.empty if call.window is None else torch.zeros
        vertical = new(*shape, k_len, dtype=torch.float32, device=q.device)
        near, far = torch.empty(2, *shape, distances, dtype=torch.float32, device=q.device)
        launch(how.masses(partial, vertical, near, far), q.device)
        return Masses(vertical, near, far)


class Means:
    """Means over tiles."""

    @staticmethod
    def supports(call: MeansCall) -> str | None:
        """The reason why this backend cannot serve the call; None where it can."""
        return _declined(call.q)

    @staticmethod
    def run(call: MeansCall) -> block_sparse.Means:
        """See kernels.patterns.block_sparse.MeansCall.run."""
        queries, of_queries = means(call.q, call.heads, lead=call.lead)
        keys, of_keys = means(call.k, call.kv_heads, lead=0)
        for kernel in (of_queries, of_keys):
            launch(kernel, call.device)
        return block_sparse.Means(queries, keys)


class Select:
    """The index of a layer: one launch writes it, several that of a very long prompt."""

    @staticmethod
    def supports(call: SelectCall) -> str | None:
        """The reason why this backend cannot serve the call; None where it can."""
        if reason := unavailable(call.device):
            return reason
        if unknown := call.unknown(First, Lines, Lists):
            return unknown
        return build_failure("builders", str(call.device))

    @staticmethod
    def run(call: SelectCall) -> SparseIndex:
        """See kernels.patterns.base.SelectCall.run."""
        index, arguments, constants = prepare(call)
        for scores in tile_scores(call, index):
            launch(selection(arguments | scores, constants), call.device)
            # Columns, diagonals and offsets are written.
            arguments["lines"] = 0
        return index


class TopK:
    """Top-k of each row."""

    @staticmethod
    def supports(call: TopKCall) -> str | None:
        """The reason why this backend cannot serve the call; None where it can."""
        if reason := unavailable(call.device):
            return reason
        if not call.scores.numel():
            return "there is nothing to select from"
        return build_failure("builders", str(call.device))

    @staticmethod
    def run(call: TopKCall) -> Tensor:
        """See kernels.topk.TopKCall.run."""
        places, kernel = top_k(call)
        launch(kernel, call.device)
        return places


def prepare(call: SelectCall) -> tuple[SparseIndex, dict[str, Any], dict[str, Any]]:
    """Memory for the index of a layer; arguments and constants of the launches that write it."""
    some = call.builder
    device = call.device
    index, heads = layout(call)
    masses = None
    massed = reach = 0
    for part in call.parts:
        if isinstance(part.builder, Lines):
            masses = part.builder.masses
            massed = len(part.heads)
        elif isinstance(part.builder, Lists):
            reach = part.builder.reach
    listed: list[int] = []
    table: list[int] = []
    for head, (pattern, builder, place) in enumerate(heads):
        table += (place if isinstance(builder, Lines) else -1, *pattern.limits())
        if isinstance(builder, Lists):
            listed += (head, max(pattern.blocks, 2) - 1)
    numbers = on_device(tuple(table), device, torch.int32)
    shares = [getattr(pattern, "coverage", None) or 0.0 for pattern, _, _ in heads]
    # All of the mass is more than any sum of it: rounding must not leave out the last.
    shares = [2.0 if share >= 1 else share for share in shares]
    # Absent tensors are never read.
    vertical, near, far = masses or (numbers, numbers, None)
    arguments = {
        "vertical": vertical.contiguous(), "near": near.contiguous(),
        "far": or_placeholder(far, numbers), "table": numbers,
        "listed": on_device(tuple(listed), device, torch.int32) if listed else numbers,
        "shares": on_device(tuple(shares), device, torch.float64) if any(shares) else numbers,
        "diagonals": index.diagonals, "columns": index.columns,
        "tiles": index.tiles, "offsets": index.offsets,
        "lines": 2 * some.batch * len(heads), "heads": len(heads), "massed": massed,
        "lists": len(listed) // 2, "k_len": some.k_len, "n": num_tiles(some.k_len),
        "seen": near.shape[-1], "diagonals_width": index.diagonals.shape[-1],
        "columns_width": index.columns.shape[-1],
        "all_rows": some.rows, "first": index.first_row, "reach": reach, "scale": some.scale,
    }  # fmt: skip
    # Without a row that may list anything the lists are constants.
    has_lists = any(width for _, width, _ in index.widths())
    constants = {
        "LISTS": has_lists, "COVERAGE": any(shares), "FAR": far is not None,
        "CHUNK": _chunk(some.k_len), "ROW_CHUNK": _chunk(num_tiles(some.k_len)),
    }  # fmt: skip
    return index, arguments, constants


def tile_scores(call: SelectCall, index: SparseIndex) -> Iterator[dict[str, Any]]:
    """Arguments of each launch for a layer's index: scores by which query tiles list key tiles."""
    lists = [part.builder for part in call.parts if isinstance(part.builder, Lists)]
    if not index.tiles.numel():
        yield {"scores": index.diagonals, "row": 0, "rows": 0, "tile": 0, "width": 0}
        return
    queries = lists[0].queries.flatten(0, 1)
    keys = lists[0].keys.flatten(0, 1).transpose(1, 2)
    for some in chunks(queries.shape[1], 4 * len(keys) * keys.shape[2], call.device):
        # No row of the chunk sees a tile outside of these.
        tile = max(index.first_row + some.start - lists[0].reach, 0)
        scores = torch.bmm(queries[:, some], keys[:, :, tile : index.first_row + some.stop])
        rows, width = scores.shape[1:]
        yield {"scores": scores, "row": some.start, "rows": rows, "tile": tile, "width": width}


def selection(arguments: dict[str, Any], constants: dict[str, Any]) -> KernelCall:
    """A launch that writes an index."""
    rows = arguments["diagonals"].shape[0] * arguments["lists"] * arguments["rows"]
    return KernelCall(
        module=_SELECT,
        kernel="select_kernel",
        grid=(arguments["lines"] + rows,),
        arguments=arguments,
        constants=constants,
        options={"num_warps": max(1, constants["CHUNK"] // 512), "enable_fp_fusion": True},
    )


def _chunk(n: int) -> int:
    """Scores of n that a program takes at a time."""
    return min(max(128, 1 << (n - 1).bit_length()), _CHUNK)


def top_k(call: TopKCall) -> tuple[Tensor, KernelCall]:
    """Memory for the places, and the launch that fills it."""
    scores = call.scores
    n = scores.shape[-1]
    width = min(call.width, n)
    places = torch.empty(len(scores), width, dtype=torch.int32, device=scores.device)
    chunk = _chunk(n)
    arguments = {
        "scores": scores.contiguous(), "places": places,
        "ends": or_placeholder(call.ends, places), "counts": or_placeholder(call.counts, places),
        "n": n, "width": width,
    }  # fmt: skip
    return places, KernelCall(
        module=_TOPK,
        kernel="top_k_kernel",
        grid=(len(scores),),
        arguments=arguments,
        constants={
            "ENDS": call.ends is not None,
            "COUNTS": call.counts is not None,
            "CHUNK": chunk,
        },
        options={"num_warps": max(1, chunk // 512), "enable_fp_fusion": True},
    )


def means(x: Keys, heads: Sequence[int], *, lead: int) -> tuple[Tensor, KernelCall]:
    """Memory for means over tiles (B, h, tiles, D) fp32, and the launch that fills it."""
    # Heads one after the other that are the same are read once.
    starts = [i for i, head in enumerate(heads) if not i or head != heads[i - 1]]
    places = [(heads[i], i, j) for i, j in pairwise([*starts, len(heads)])]
    tiles = num_tiles(lead + x.shape[2])
    averages = torch.empty(
        x.shape[0], len(heads), tiles, x.shape[3], dtype=torch.float32, device=x.device
    )
    arguments = {
        "means": averages,
        "places": on_device(tuple(n for place in places for n in place), x.device, torch.int32),
        "heads": len(heads), "wanted": len(places), "tiles": tiles, "length": x.shape[2],
        "lead": lead,
        **_rows_of(x, "x"),
    }  # fmt: skip
    return averages, KernelCall(
        module=_MEANS,
        kernel="means_kernel",
        grid=(x.shape[0] * len(places) * tiles,),
        arguments=arguments,
        constants=_sizes(x),
        options={"num_warps": 4, "enable_fp_fusion": True},
    )


def _rows_of(x: Keys, name: str) -> dict[str, Any]:
    """Arguments that say where keys lie."""
    if isinstance(x, Tensor):
        held = with_rows(x)
        # Absent pages are never read; any tensor serves as the argument.
        pages = held
        width = 0
        order = (0, 1, 2)
    else:
        held = x.cache
        pages = x.table.contiguous()
        width = x.table.shape[1]
        order = (0, 2, 1)
    strides = {
        f"{name}_{axis}": held.stride(i)
        for i, axis in zip(order, ("batch", "head", "row"), strict=True)
    }
    return {name: held, "pages": pages, "pages_width": width, **strides}


def _where(q: Tensor, k: Keys) -> dict[str, Any]:
    """Arguments that say where queries and keys lie."""
    q = with_rows(q)
    strides = {f"q_{axis}": q.stride(i) for i, axis in enumerate(("batch", "head", "row"))}
    return {"q": q, "q_len": q.shape[2], "k_len": k.shape[2], **strides, **_rows_of(k, "k")}


def _sizes(k: Keys) -> dict[str, Any]:
    """Constants of keys that are compiled in."""
    sizes = dict(zip(("D", "D0", "D1"), (k.shape[3], *split(k.shape[3])), strict=True))
    page = 0
    if not isinstance(k, Tensor):
        page = k.cache.shape[1]
    return {**sizes, "PAGE": page}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An estimate's launches: their common arguments, blocks of 64 queries, chunks of key tiles."""

    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, Any]
    programs: int
    blocks: int
    chunks: int

    def normalisers(self, partial: Tensor) -> KernelCall:
        """Log-sum-exp of each query over each chunk, to `partial` (B, h, blocks * 64, chunks)."""
        return KernelCall(
            module=_MODULE,
            kernel="normalisers_kernel",
            grid=(self.programs, self.blocks),
            arguments=self.arguments | {"normalisers": partial},
            constants=self.constants,
            options=self.options,
        )

    def masses(
        self, normalisers: Tensor, vertical: Tensor, near: Tensor, far: Tensor
    ) -> KernelCall:
        """The masses of all queries, block after block."""
        tensors = {"normalisers": normalisers, "vertical": vertical, "near": near, "far": far}
        return KernelCall(
            module=_MODULE,
            kernel="masses_kernel",
            grid=(self.programs,),
            arguments=self.arguments | tensors,
            constants=self.constants | {"BLOCKS": self.blocks > 1},
            options=self.options,
        )


def plan(call: EstimateCall) -> Plan:
    """Launches of an estimate."""
    q = call.q
    k = call.k
    heads = call.heads
    window = call.window
    batch, num_heads, q_len, dim = q.shape
    k_len = k.shape[2]
    group_size = num_heads // k.shape[1]
    last = [min(n, q_len) for n in call.last_q]
    # Of several blocks their sums take the registers of a second head.
    at_once = 1
    if dim <= _MOST_FOR_TWO and max(last) <= TILE:
        at_once = 2
    members = _members(heads, last, group_size, at_once)
    if window is None:
        seen = k_len
    else:
        seen = min(k_len, max(last) + window - 1)
    tiles = num_tiles(seen)
    blocks = num_tiles(max(last))
    groups = len(members)
    chunk = -(-tiles // min(_MOST_CHUNKS, -(-_PROGRAMS // (batch * groups))))
    chunks = -(-tiles // chunk)
    arguments: dict[str, Any] = {
        **_where(q, k),
        "members": on_device(tuple(n for group in members for member in group for n in member),
        q.device),
        "scale": call.scale * _LOG2E, "heads": len(heads), "groups": groups,
        "group_size": group_size,
        "tiles": tiles, "chunk": chunk, "chunks": chunks, "rows": blocks * TILE,
        "window": window or 0,
    }  # fmt: skip
    constants = {
        **_sizes(k),
        "MEMBERS": len(members[0]), "WINDOW": window is not None and window < k_len,
    }  # fmt: skip
    target = architecture(q.device)
    build = select_config(target, dim=dim, itemsize=q.element_size(), has_tiles=False)
    warps = 4
    if len(members[0]) == 2 or dim > _MOST_FOR_TWO or max(last) > TILE:
        warps = 8
    options = {"num_warps": warps, "num_stages": build.stages, "enable_fp_fusion": True}
    return Plan(
        arguments=arguments,
        constants=constants | {"STAGES": build.stages},
        options=options,
        programs=batch * groups * chunks,
        blocks=blocks,
        chunks=chunks,
    )


def _members(
    heads: Sequence[int], last: Sequence[int], group_size: int, limit: int
) -> list[list[tuple[int, int, int]]]:
    """Up to `limit` heads of a KV head, each with its place and queries; empty partners fill up."""
    by_kv: dict[int, list[tuple[int, int, int]]] = {}
    for place, head in enumerate(heads):
        by_kv.setdefault(head // group_size, []).append((head, place, last[place]))
    size = min(limit, max(map(len, by_kv.values())))
    groups = [
        some[i : i + size] for _, some in sorted(by_kv.items()) for i in range(0, len(some), size)
    ]
    return [some + [(*some[0][:2], 0)] * (size - len(some)) for some in groups]


def launch(call: KernelCall, device: torch.device) -> None:
    """Launch a kernel of the builders."""
    run_calls([call], device, "builders", str(device))
