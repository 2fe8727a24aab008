"""Sparse attention on the GPU in Triton: checks a call, prepares and launches it.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim, N key tiles.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.attention.triton_launch import Launch, architecture, choose, serves, split, unavailable
from kernels.attention.triton_tuned import best
from kernels.breaker import building, failure
from kernels.copies import on_device
from kernels.dispatch import derivative_wanted
from kernels.index import PAD, TILE, SparseIndex, ascending, num_tiles
from kernels.ragged import Ragged

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_DIM = 512
_LOG2E = 1.4426950408889634


def supports(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why this backend cannot serve the call; None where it can. Looks for triton only if the tensors are on a GPU."""
    if reason := unavailable(q.device):
        return reason
    if q.dtype not in _DTYPES:
        return f"it serves float32, float16 and bfloat16, not {q.dtype}"
    if (widest := max(q.shape[-1], v.shape[-1])) > _MAX_DIM:
        return f"it serves head dims up to {_MAX_DIM}, not {widest}"
    if reason := derivative_wanted(q, k, v) or failure(*_build(q, v)):
        return reason
    if not serves(target := architecture(q.device), dim=widest, itemsize=q.element_size()):
        return f"float32 with head dim {widest} does not fit the shared memory of {target}"
    return None


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: SparseIndex,
    *,
    scale: float,
    softcap: float | None,
    block_table: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    launch: Launch | None = None,
) -> tuple[Tensor, Tensor]:
    """See kernels.attention.sparse_attention; `launch` takes another build than the table's."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    how: dict[str, Any] = {"scale": scale, "softcap": softcap, "block_table": block_table, "sinks": sinks}
    call = prepare(q, k, v, index, **how, out=out, launch=launch)
    with building(*_build(q, v)):
        return _run(call, q.device)


def _build(q: Tensor, v: Tensor) -> tuple[object, ...]:
    """What a build that fails is remembered by."""
    return "attention", str(q.device), q.dtype, q.shape[-1], v.shape[-1]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One launch: its grid, the kernel's arguments in order, those of them that are compiled in, and the build."""

    grid: tuple[int]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    launch: Launch


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: SparseIndex,
    *,
    scale: float,
    softcap: float | None,
    block_table: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    launch: Launch | None = None,
    target: str | None = None,
) -> Call:
    """The launch that serves a call; with a block table k and v are caches (pages, page size, G, dim).

    `target` compiles for another architecture than that of q's device.
    """
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")
    num_heads, q_len, dim, v_dim = *q.shape[1:], v.shape[-1]
    tiles, columns, ragged = index.tiles, index.columns, index.ragged
    # A window that holds all keys costs a comparison for each of them.
    window = None if index.window is None or index.window >= index.k_len else index.window
    has_tiles = tiles.shape[-1] > 0
    sizes: dict[str, Any] = {"dim": max(dim, v_dim), "itemsize": q.element_size(), "has_tiles": has_tiles}
    if launch is None:
        launch = choose(target, **sizes) if target else best(q.device, architecture(q.device), **sizes)
    out, lse = _results(q, v_dim, ragged, out)
    tables = _tables(index, launch.rows, window)
    walk, held = tables["walk"], tables["held"]
    # Where both layouts keep (batch or page, head, row).
    order = (0, 1, 2) if block_table is None else (0, 2, 1)
    arguments: dict[str, Any] = {
        "q": q, "k": k, "v": v, "out": out, "lse": lse, **tables,
        "tiles": tiles.contiguous(), "columns": columns.contiguous(),
        "dense_tail": on_device(index.dense_tail, q.device, torch.int32) if any(index.dense_tail) else walk,
        "pages": walk if block_table is None else block_table.contiguous(),
        "places": walk if ragged is None else ragged.table(q.device),
        "sinks": lse if sinks is None else sinks.float().contiguous(),
        **_factors(scale, softcap),
    }  # fmt: skip
    for name, tensor, axes in (("q", q, (0, 1, 2)), ("k", k, order), ("v", v, order), ("out", out, (0, 1, 2))):
        arguments |= {
            f"{name}_{axis}": tensor.stride(i) for axis, i in zip(("batch", "head", "row"), axes, strict=True)
        }
    arguments |= {
        "num_heads": num_heads, "num_kv_heads": k.shape[order[1]], "q_len": q_len, "k_len": index.k_len,
        "first_row": index.first_row, "num_rows": index.num_rows, "window": window or 0,
        "walk_width": walk.shape[-1], "table_width": held.shape[-1], "tiles_width": tiles.shape[-1],
        "columns_width": columns.shape[-1], "pages_width": 0 if block_table is None else block_table.shape[-1],
        "search_steps": tiles.shape[-1].bit_length(),
    }  # fmt: skip
    # A product of fp32 without the matrix units holds whole operands in registers.
    widest = 128 if q.dtype == torch.float32 and launch.precision == "ieee" else 256
    constants = {
        **dict(zip(("D", "D0", "D1"), (dim, *split(dim, widest)), strict=True)),
        **dict(zip(("E", "E0", "E1"), (v_dim, *split(v_dim, widest)), strict=True)),
        "SOFTCAP": softcap is not None, "PRECISION": launch.precision,
        "HAS_WALK": _diagonals(index, window).shape[-1] > 1, "HAS_TILES": has_tiles,
        "HAS_COLUMNS": columns.shape[-1] > 0, "DENSE_TAIL": any(index.dense_tail), "WINDOW": window is not None,
        "RAGGED": ragged is not None, "PAGE": 0 if block_table is None else k.shape[1],
        "ROWS": launch.rows, "KEYS": launch.keys, "PARTS": TILE // launch.keys, "STAGES": launch.stages,
        "SINKS": sinks is not None,
    }  # fmt: skip
    blocks = -(-index.num_rows // launch.rows)
    grid = (index.batch * num_heads * blocks,)
    return Call(grid=grid, arguments=arguments, constants=constants, launch=launch)


def _results(q: Tensor, v_dim: int, ragged: Ragged | None, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Memory for out and lse; rows of q that are in no sequence are 0 and -inf already."""
    batch, num_heads, q_len, _ = q.shape
    if ragged is None or ragged.covers(batch, q_len):
        if out is None:
            out = q.new_empty(batch, q_len, num_heads, v_dim).transpose(1, 2)
        return out, torch.empty(batch, num_heads, q_len, dtype=torch.float32, device=q.device)
    if out is None:
        out = q.new_zeros(batch, q_len, num_heads, v_dim).transpose(1, 2)
    else:
        for row, rest in _between(ragged, batch, q_len):
            out[row, :, rest].zero_()
    return out, torch.full((batch, num_heads, q_len), float("-inf"), device=q.device)


def _between(ragged: Ragged, batch: int, q_len: int) -> Iterator[tuple[int, slice]]:
    """The batch element and the range of each run of query rows that belongs to no sequence."""
    for row in range(batch):
        places = zip(ragged.rows, ragged.q_starts, ragged.q_lens, strict=True)
        end = 0
        for start, length in sorted((start, length) for at, start, length in places if at == row):
            if start > end:
                yield row, slice(end, start)
            end = start + length
        if end < q_len:
            yield row, slice(end, q_len)


def _factors(scale: float, softcap: float | None) -> dict[str, float]:
    """Both factors with log2(e) folded in; with a soft-cap, scale is what makes the product the exponent of e^2x."""
    if softcap is None:
        return {"scale": scale * _LOG2E, "softcap": 0.0}
    return {"scale": 2 * scale / softcap * _LOG2E, "softcap": softcap * _LOG2E}


def _diagonals(index: SparseIndex, window: int | None) -> Tensor:
    """The diagonals that reach into the window: ascending, so that none lies beyond this width."""
    return index.diagonals if window is None else index.diagonals[..., : index.reach + 1]


def _tables(index: SparseIndex, rows: int, window: int | None) -> dict[str, Tensor]:
    """The kernel's tables of these names, from the index without reading it on the host."""
    n, device = num_tiles(index.k_len), index.diagonals.device
    diagonals = _diagonals(index, window).contiguous()
    if window is not None:
        diagonals = diagonals.masked_fill(diagonals > index.reach, PAD)
    batch, num_heads, width = diagonals.shape
    at = torch.arange(n + 1, dtype=torch.int32, device=device)
    held = torch.zeros(batch, num_heads, n + 1, dtype=torch.uint8, device=device)
    held.scatter_(-1, diagonals.clamp(max=n).long(), 1)
    held[..., n].zero_()
    if rows == 1:
        walk = diagonals
        # Diagonal 0 is the own tile, which is not walked.
        walk_counts = _count(walk, at + 1) - 1
    else:
        wants = held[..., :n] + 2 * held[..., 1:]
        wants[..., 0].zero_()
        before = ascending(wants > 0, min(n, 2 * width))
        wanted = wants.gather(-1, before.clamp(max=n - 1).long())
        walk = torch.where(before < n, 4 * before + wanted, PAD)
        walk_counts = _count(walk, 4 * (at + 1))
    # Diagonals 0, 1, 2 ... without a gap hold whatever lies in so many tiles up to the own one.
    unbroken = (diagonals == torch.arange(width, device=device)).sum(-1, keepdim=True)
    column_counts = _count(index.columns, (at + 1 - unbroken).clamp(min=0) * TILE)
    # Without a window nobody looks at the last.
    starts = column_counts if window is None else _count(index.columns, (at - index.reach).clamp(min=0) * TILE)
    return {
        "walk": walk, "walk_counts": walk_counts, "held": held, "column_counts": column_counts, "column_starts": starts,
    }  # fmt: skip


def _count(entries: Tensor, below: Tensor) -> Tensor:
    """How many of the ascending entries (B, H, n) lie below each of the bounds (..., m): (B, H, m) int32."""
    bounds = below.to(torch.int32).expand(*entries.shape[:2], -1).contiguous()
    return torch.searchsorted(entries.contiguous(), bounds, out_int32=True)


def build_options(launch: Launch) -> dict[str, Any]:
    """Triton's own options. Fused multiply-adds are named because its default is about to change."""
    limit = {} if launch.registers is None else {"maxnreg": launch.registers}
    return {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": True, **limit}


def _run(call: Call, device: torch.device) -> tuple[Tensor, Tensor]:
    from kernels.attention.triton_kernel import sparse_attention_kernel

    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        sparse_attention_kernel[call.grid](**call.arguments, **call.constants, **build_options(call.launch))
    return call.arguments["out"], call.arguments["lse"]
