"""What builders do to whole prompts, in Triton on GPUs: prepares and launches triton_kernels.py.

In torch the estimate writes the attention of the last queries out, four bytes a key for each of them, and reads it
again several times; here it stays on the chip. Means over tiles, of queries and of keys, are made in the launch that
reads the keys first, or in one of their own. All choices of a layer are one launch.

Shapes: B batch, H query heads, h heads asked for, G KV heads, Q query length, K key length, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernels.attention.triton_launch import architecture, choose, split, unavailable
from kernels.breaker import failure
from kernels.copies import on_device
from kernels.dispatch import say_once
from kernels.index import TILE, num_tiles
from kernels.patterns.paged import Keys
from kernels.triton_calls import KernelCall, run_calls

_MODULE = f"{__package__}.triton_kernels"
_CHOICE = f"{__package__}.triton_choice_kernel"
_LOG2E = 1.4426950408889634
_MAX_DIM = 256
# The widest heads of which two at a time fit the smaller shared memories.
_MOST_FOR_TWO = 128
# Programs that keep every GPU busy to the end, and chunks of keys whose sums are put together afterwards.
_PROGRAMS = 1024
_MOST_CHUNKS = 64
# What a launch that makes no means beside is told of them.
_COUNTS = ("pooled", "q_wanted", "k_wanted", "q_tiles", "k_tiles", "q_lead", "k_lead", "q_programs")


# Scores of a row that a program takes at a time.
_CHUNK = 4096


def serves(x: Keys) -> bool:
    """Whether Triton serves builders on these tensors: half precision on a GPU that it compiles for."""
    fits = x.dtype in (torch.float16, torch.bfloat16) and x.shape[-1] <= _MAX_DIM
    return fits and unavailable(x.device) is None and _built(x.device)


def _built(device: torch.device) -> bool:
    """Whether no kernel of the builders has failed to build for the device; torch does their work where one has."""
    reason = failure("builders", str(device))
    if reason is not None:
        say_once("triton for builders", reason)
    return reason is None


def chooses(scores: Tensor, coverage: Sequence[float | None]) -> bool:
    """Whether Triton makes this choice: on a GPU, by number alone."""
    wanted = scores.numel() > 0 and all(share is None for share in coverage)
    return wanted and unavailable(scores.device) is None and _built(scores.device)


def best_places(
    scores: Tensor, sizes: Sequence[int], *, forced: int, ends: Tensor | None, counts: Tensor | None
) -> Tensor:
    """See kernels.patterns.choose.best_places."""
    places, launch = choice(scores, sizes, forced=forced, ends=ends, counts=counts)
    run(launch, scores.device)
    return places


def choice(
    scores: Tensor, sizes: Sequence[int], *, forced: int, ends: Tensor | None = None, counts: Tensor | None = None
) -> tuple[Tensor, KernelCall]:
    """Memory for the places, and the launch that fills it."""
    n = scores.shape[-1]
    width = min(max(sizes), n)
    places = torch.empty(*scores.shape[:-1], width, dtype=torch.int32, device=scores.device)
    arguments = {
        "scores": scores.contiguous(), "sizes": on_device(tuple(sizes), scores.device), "places": places,
        # What is absent is never read; some tensor has to stand there.
        "ends": places if ends is None else ends.contiguous(),
        "counts": places if counts is None else counts.contiguous(),
        "heads": scores.shape[1], "rows": scores.shape[2:-1].numel(), "n": n, "width": width,
    }  # fmt: skip
    return places, KernelCall(
        module=_CHOICE,
        kernel="best_places_kernel",
        grid=(scores.shape[:-1].numel(),),
        arguments=arguments,
        **_chunked(n, {"FORCED": forced, "ENDS": ends is not None, "COUNTS": counts is not None}),
    )


def _chunked(n: int, constants: dict[str, Any]) -> dict[str, Any]:
    """How a choice among rows of n scores is built."""
    chunk = min(max(128, 1 << (n - 1).bit_length()), _CHUNK)
    return {
        "constants": {**constants, "CHUNK": chunk},
        "options": {"num_warps": max(1, chunk // 512), "enable_fp_fusion": True},
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class Lines:
    """What columns and diagonals are chosen by: `masses`, and of each head its number, columns and distances.

    others: the heads beside them, whose entries are taken over from `diagonals` and `columns` (B, H, any width).
    """

    vertical: Tensor
    near: Tensor
    far: Tensor
    heads: tuple[tuple[int, int, int], ...]
    others: tuple[int, ...]
    diagonals: Tensor
    columns: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Lists:
    """What tiles are chosen by: scores (B * h, rows, n), and of each head its number and how many beside the own tile.

    Row i is query tile row + i, at key tile first + row + i, and sees `reach` tiles before its own. Its scores are of
    the n tiles from `tile` on.
    """

    scores: Tensor
    heads: tuple[tuple[int, int], ...]
    first: int
    row: int
    reach: int
    tile: int = 0


def fill(made: Mapping[str, Tensor], lines: Lines | None, lists: Lists | None) -> None:
    """Write what is chosen, and what other heads have, to diagonals, columns and tiles of an index, in one launch."""
    run(choices(made, lines, lists), made["diagonals"].device)


def choices(made: Mapping[str, Tensor], lines: Lines | None, lists: Lists | None) -> KernelCall:
    """The launch of `fill`."""
    diagonals, columns, offsets = (made[name] for name in ("diagonals", "columns", "offsets"))
    batch, heads, device = *diagonals.shape[:2], diagonals.device
    # What is absent is never read; some tensor has to stand there.
    absent = torch.empty(0, dtype=torch.float32, device=device)
    by_row = absent if lists is None else lists.scores
    vertical, near, far = (absent,) * 3 if lines is None else (lines.vertical, lines.near, lines.far)
    lined, others = (lines.heads, lines.others) if lines else ((), ())
    listed = lists.heads if lists else ()
    rows = 0 if lists is None else lists.scores.shape[1]
    arguments = {
        "vertical": vertical, "near": near, "far": far, "columns": columns, "diagonals": diagonals,
        "scores": by_row, "offsets": offsets, "tiles": made["tiles"],
        "line_heads": on_device(tuple(n for one in lined for n in one), device, torch.int32) if lined else columns,
        "other_heads": on_device(others, device, torch.int32) if others else columns,
        "other_diagonals": lines.diagonals if lines else diagonals,
        "other_columns": lines.columns if lines else columns,
        "list_heads": on_device(tuple(n for one in listed for n in one), device, torch.int32) if listed else columns,
        "heads": heads, "lines": len(lined), "others": len(others), "k_len": vertical.shape[-1], "seen": near.shape[-1],
        "columns_width": columns.shape[-1], "diagonals_width": diagonals.shape[-1],
        "listing": len(listed), "rows": rows, "all_rows": offsets.shape[-1] - 1, "n": by_row.shape[-1],
        "first": lists.first if lists else 0, "row0": lists.row if lists else 0, "reach": lists.reach if lists else 0,
        "tile0": lists.tile if lists else 0,
        "elements": batch,
    }  # fmt: skip
    return KernelCall(
        module=_CHOICE,
        kernel="choose_kernel",
        grid=(batch * (2 * len(lined) + len(others) + len(listed) * rows),),
        arguments=arguments,
        # By all key tiles, so that every chunk of rows has the same build.
        **_chunked(max(vertical.shape[-1], lists.first + offsets.shape[-1] - 1 if lists else 0), {}),
    )


def estimate(
    q: Tensor, k: Keys, heads: Sequence[int], last_q: Sequence[int], *, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """See kernels.patterns.last_queries.estimate. The sums have an order of their own, each time the same."""
    vertical, near, far = masses(q, k, heads, last_q, scale=scale, window=window)
    slash = torch.zeros_like(vertical)
    seen = min(near.shape[-1], k.shape[2])
    torch.add(near[..., :seen], far[..., :seen], out=slash[..., :seen])
    return vertical, slash


@dataclass(frozen=True, kw_only=True, eq=False)
class Means:
    """Memory for means over tiles of queries and of keys, (B, h, tiles, D) fp32, and what a launch needs to fill it."""

    queries: Tensor
    keys: Tensor
    arguments: dict[str, Any]
    constants: dict[str, Any]
    programs: int

    def alone(self) -> KernelCall:
        """A launch that does nothing else."""
        return KernelCall(
            module=_MODULE,
            kernel="means_kernel",
            grid=(self.programs,),
            arguments=self.arguments,
            constants=self.constants,
            options={"num_warps": 4, "enable_fp_fusion": True},
        )


def means(
    q: Tensor, k: Keys, q_heads: Sequence[int], k_heads: Sequence[int], *, q_lead: int = 0, k_lead: int = 0
) -> Means:
    """The means of some heads of queries and of keys, of as many or of one alone; `lead` as in `mean_of_tiles`."""
    arguments = _where(q, k)
    made, programs = [], []
    for name, x, heads, lead in (("q", q, q_heads, q_lead), ("k", k, k_heads, k_lead)):
        # Heads one after the other that are the same are read once.
        starts = [i for i, head in enumerate(heads) if not i or head != heads[i - 1]]
        places = [(heads[i], i, j) for i, j in pairwise([*starts, len(heads)])]
        tiles = num_tiles(lead + x.shape[2])
        made.append(torch.empty(x.shape[0], len(heads), tiles, x.shape[3], dtype=torch.float32, device=q.device))
        programs.append(x.shape[0] * len(places) * tiles)
        arguments |= {
            f"{name}_means": made[-1], f"{name}_wanted": len(places), f"{name}_tiles": tiles, f"{name}_lead": lead,
            f"{name}_places": on_device(tuple(n for place in places for n in place), q.device, torch.int32),
        }  # fmt: skip
    arguments |= {"pooled": max(len(q_heads), len(k_heads)), "q_programs": programs[0]}
    return Means(queries=made[0], keys=made[1], arguments=arguments, constants=_sizes(q, k), programs=sum(programs))


def mean_of_tiles(x: Keys, heads: Sequence[int], *, lead: int) -> Tensor:
    """See kernels.patterns.block_sparse.mean_of_tiles."""
    none = torch.empty(1, 1, 0, x.shape[3], dtype=x.dtype, device=x.device)
    found = means(none, x, (), heads, k_lead=lead)
    run(found.alone(), x.device)
    return found.keys


def _where(q: Tensor, k: Keys) -> dict[str, Any]:
    """Arguments that say where queries and keys lie."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    if isinstance(k, Tensor):
        held = k if k.stride(-1) == 1 else k.contiguous()
        # Pages that are absent are never read; some tensor has to stand there.
        pages, width, order = held, 0, (0, 1, 2)
    else:
        held, pages, width, order = k.cache, k.table.contiguous(), k.table.shape[1], (0, 2, 1)
    return {
        "q": q, "k": held, "pages": pages, "pages_width": width, "q_len": q.shape[2], "k_len": k.shape[2],
        **{f"q_{axis}": q.stride(i) for i, axis in enumerate(("batch", "head", "row"))},
        **{f"k_{axis}": held.stride(i) for i, axis in zip(order, ("batch", "head", "row"), strict=True)},
    }  # fmt: skip


def _sizes(q: Tensor, k: Keys) -> dict[str, Any]:
    """What is compiled in of queries and keys."""
    sizes = dict(zip(("D", "D0", "D1"), (q.shape[3], *split(q.shape[3])), strict=True))
    return {**sizes, "PAGE": 0 if isinstance(k, Tensor) else k.cache.shape[1]}


def masses(
    q: Tensor,
    k: Keys,
    heads: Sequence[int],
    last_q: Sequence[int],
    *,
    scale: float,
    window: int | None,
    beside: Means | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The estimate with its diagonals in two parts: (B, h, K), and two (B, h, distances) that add up to their mass.

    beside: means of the same queries and keys, which are filled as well.
    """
    how = plan(q, k, heads, last_q, scale=scale, window=window)
    shape, seen = (q.shape[0], len(heads)), how.arguments["tiles"] * TILE
    partial = torch.empty(*shape, how.blocks * TILE, how.chunks, dtype=torch.float32, device=q.device)
    run(how.normalisers(partial, beside), q.device)
    # Nobody writes to keys that no query sees.
    new = torch.empty if window is None else torch.zeros
    vertical = new(*shape, k.shape[2], dtype=torch.float32, device=q.device)
    near, far = torch.empty(2, *shape, seen, dtype=torch.float32, device=q.device)
    run(how.masses(partial, vertical, near, far), q.device)
    return vertical, near, far


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An estimate cut up into launches: what they have in common, blocks of 64 queries, and chunks of key tiles."""

    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, Any]
    programs: int
    blocks: int
    chunks: int

    def normalisers(self, partial: Tensor, beside: Means | None = None) -> KernelCall:
        """The log-sum-exp of each query over each chunk, to `partial` (B, h, blocks * 64, chunks), and these means."""
        more: dict[str, Any] = dict.fromkeys(("q_means", "k_means", "q_places", "k_places"), partial)
        more |= dict.fromkeys(_COUNTS, 0) if beside is None else beside.arguments
        return KernelCall(
            module=_MODULE,
            kernel="normalisers_kernel",
            grid=(self.programs + (beside.programs if beside else 0), self.blocks),
            arguments=more | self.arguments | {"normalisers": partial, "programs": self.programs},
            constants=self.constants | {"MEANS": beside is not None},
            options=self.options,
        )

    def masses(self, normalisers: Tensor, vertical: Tensor, near: Tensor, far: Tensor) -> KernelCall:
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


def plan(
    q: Tensor,
    k: Keys,
    heads: Sequence[int],
    last_q: Sequence[int],
    *,
    scale: float,
    window: int | None,
    target: str | None = None,
) -> Plan:
    """How an estimate is made; `target` compiles for another architecture than that of q's device."""
    batch, num_heads, q_len, dim = q.shape
    k_len, group_size = k.shape[2], num_heads // k.shape[1]
    last = [min(n, q_len) for n in last_q]
    # Of several blocks their sums take the registers of a second head.
    members = _members(heads, last, group_size, 2 if dim <= _MOST_FOR_TWO and max(last) <= TILE else 1)
    seen = k_len if window is None else min(k_len, max(last) + window - 1)
    tiles, blocks, groups = num_tiles(seen), num_tiles(max(last)), len(members)
    chunk = -(-tiles // min(_MOST_CHUNKS, -(-_PROGRAMS // (batch * groups))))
    chunks = -(-tiles // chunk)
    arguments: dict[str, Any] = {
        **_where(q, k),
        "members": on_device(tuple(n for group in members for member in group for n in member), q.device),
        "scale": scale * _LOG2E, "heads": len(heads), "groups": groups, "group_size": group_size,
        "tiles": tiles, "chunk": chunk, "chunks": chunks, "rows": blocks * TILE, "window": window or 0,
    }  # fmt: skip
    constants = {
        **_sizes(q, k),
        "MEMBERS": len(members[0]), "WINDOW": window is not None and window < k_len,
    }  # fmt: skip
    build = choose(target or architecture(q.device), dim=dim, itemsize=q.element_size(), has_tiles=False)
    warps = 8 if len(members[0]) == 2 or dim > _MOST_FOR_TWO or max(last) > TILE else 4
    options = {"num_warps": warps, "num_stages": build.stages, "enable_fp_fusion": True}
    return Plan(
        arguments=arguments,
        constants=constants | {"STAGES": build.stages},
        options=options,
        programs=batch * groups * chunks,
        blocks=blocks,
        chunks=chunks,
    )


def _members(heads: Sequence[int], last: Sequence[int], group_size: int, most: int) -> list[list[tuple[int, int, int]]]:
    """Up to `most` heads that share a KV head, each with its place and number of queries; empty partners fill up."""
    by_kv: dict[int, list[tuple[int, int, int]]] = {}
    for place, head in enumerate(heads):
        by_kv.setdefault(head // group_size, []).append((head, place, last[place]))
    size = min(most, max(map(len, by_kv.values())))
    groups = [some[i : i + size] for _, some in sorted(by_kv.items()) for i in range(0, len(some), size)]
    return [some + [(*some[0][:2], 0)] * (size - len(some)) for some in groups]


def run(call: KernelCall, device: torch.device) -> None:
    """Launch a kernel of the builders."""
    run_calls([call], device, "builders", str(device))
