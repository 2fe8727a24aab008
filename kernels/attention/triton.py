"""Sparse attention on the GPU in Triton: checks a call, prepares and launches it.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim, N key tiles.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.attention.triton_launch import Launch, architecture, choose, serves, split
from kernels.index import PAD, TILE, SparseIndex, ascending, num_tiles
from kernels.patterns.dense import dense_index

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_DIM = 256
_LOG2E = 1.4426950408889634
# Triton reads the variable once, when the kernel is defined.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def supports(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why this backend cannot serve the call; None where it can. Looks for triton only if the tensors are on a GPU."""
    if q.device.type != "cuda" and not _INTERPRETED:
        return f"it serves tensors on a GPU, not on {q.device.type}"
    if q.dtype not in _DTYPES:
        return f"it serves float32, float16 and bfloat16, not {q.dtype}"
    if (widest := max(q.shape[-1], v.shape[-1])) > _MAX_DIM:
        return f"it serves head dims up to {_MAX_DIM}, not {widest}"
    if reason := _missing(q.device):
        return reason
    if not serves(target := architecture(q.device), dim=widest, itemsize=q.element_size()):
        return f"float32 with head dim {widest} does not fit the shared memory of {target}"
    return None


@functools.cache
def _missing(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            return f"it needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
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
    out: Tensor | None = None,
    launch: Launch | None = None,
) -> tuple[Tensor, Tensor]:
    """See kernels.attention.sparse_attention; `launch` takes another build than the table's."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    how: dict[str, Any] = {"scale": scale, "softcap": softcap, "block_table": block_table, "launch": launch}
    out, lse = _run(prepare(q, k, v, index, out=out, **how), q.device)
    if index.dense_tail:
        tail = min(index.q_len, index.k_len - min(index.first_dense()) * TILE)
        whole = dense_index(index.batch, index.num_heads, tail, index.k_len, q.device)
        call = prepare(q[:, :, -tail:], k, v, whole, out=out[:, :, -tail:], **how)
        lse[:, :, -tail:] = _run(call, q.device)[1]
    return out, lse


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
    out: Tensor | None = None,
    launch: Launch | None = None,
    target: str | None = None,
) -> Call:
    """The launch that serves a call; with a block table k and v are caches (pages, page size, G, dim).

    `target` compiles for another architecture than that of q's device.
    """
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")
    batch, num_heads, q_len, dim = q.shape
    v_dim = v.shape[-1]
    tiles, columns = index.tiles, index.columns
    has_tiles = tiles.shape[-1] > 0
    launch = launch or choose(
        target or architecture(q.device), dim=max(dim, v_dim), itemsize=q.element_size(), has_tiles=has_tiles
    )
    if out is None:
        out = torch.empty(batch, q_len, num_heads, v_dim, dtype=q.dtype, device=q.device).transpose(1, 2)
    lse = torch.empty(batch, num_heads, q_len, dtype=torch.float32, device=q.device)
    walk, walk_counts, held, column_counts = _tables(index, launch.rows)
    # Where both layouts keep (batch or page, head, row).
    order = (0, 1, 2) if block_table is None else (0, 2, 1)
    arguments: dict[str, Any] = {
        "q": q, "k": k, "v": v, "out": out, "lse": lse, "walk": walk, "walk_counts": walk_counts, "held": held,
        "tiles": tiles.contiguous(), "columns": columns.contiguous(), "column_counts": column_counts,
        "pages": walk if block_table is None else block_table.contiguous(),
        **_factors(scale, softcap),
    }  # fmt: skip
    for name, tensor, axes in (("q", q, (0, 1, 2)), ("k", k, order), ("v", v, order), ("out", out, (0, 1, 2))):
        arguments |= {
            f"{name}_{axis}": tensor.stride(i) for axis, i in zip(("batch", "head", "row"), axes, strict=True)
        }
    arguments |= {
        "num_heads": num_heads, "num_kv_heads": k.shape[order[1]], "q_len": q_len, "k_len": index.k_len,
        "first_row": index.first_row, "num_rows": index.num_rows, "walk_width": walk.shape[-1],
        "table_width": held.shape[-1], "tiles_width": tiles.shape[-1], "columns_width": columns.shape[-1],
        "pages_width": 0 if block_table is None else block_table.shape[-1],
        "search_steps": tiles.shape[-1].bit_length(),
    }  # fmt: skip
    # A product of fp32 without the matrix units holds whole operands in registers.
    widest = 128 if q.dtype == torch.float32 and launch.precision == "ieee" else _MAX_DIM
    constants = {
        **dict(zip(("D", "D0", "D1"), (dim, *split(dim, widest)), strict=True)),
        **dict(zip(("E", "E0", "E1"), (v_dim, *split(v_dim, widest)), strict=True)),
        "SOFTCAP": softcap is not None, "PRECISION": launch.precision,
        "HAS_WALK": index.diagonals.shape[-1] > 1, "HAS_TILES": has_tiles, "HAS_COLUMNS": columns.shape[-1] > 0,
        "PAGE": 0 if block_table is None else k.shape[1],
        "ROWS": launch.rows, "KEYS": launch.keys, "PARTS": TILE // launch.keys, "STAGES": launch.stages,
    }  # fmt: skip
    blocks = -(-index.num_rows // launch.rows)
    return Call(grid=(batch * num_heads * blocks,), arguments=arguments, constants=constants, launch=launch)


def _factors(scale: float, softcap: float | None) -> dict[str, float]:
    """Both factors with log2(e) folded in; with a soft-cap, scale is what makes the product the exponent of e^2x."""
    if softcap is None:
        return {"scale": scale * _LOG2E, "softcap": 0.0}
    return {"scale": 2 * scale / softcap * _LOG2E, "softcap": softcap * _LOG2E}


def _tables(index: SparseIndex, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel's walk, walk_counts, held and column_counts, from the index without reading it on the host."""
    diagonals, n = index.diagonals.contiguous(), num_tiles(index.k_len)
    batch, num_heads, width = diagonals.shape
    at = torch.arange(n + 1, dtype=torch.int32, device=diagonals.device)
    held = torch.zeros(batch, num_heads, n + 1, dtype=torch.uint8, device=diagonals.device)
    held.scatter_(-1, diagonals.clamp(max=n).long(), 1)
    held[..., n] = 0
    if rows == 1:
        walk = diagonals
        # Diagonal 0 is the own tile, which is not walked.
        walk_counts = _count(walk, at + 1) - 1
    else:
        wants = held[..., :n] + 2 * held[..., 1:]
        wants[..., 0] = 0
        before = ascending(wants > 0, min(n, 2 * width))
        wanted = wants.gather(-1, before.clamp(max=n - 1).long())
        walk = torch.where(before < n, 4 * before + wanted, PAD)
        walk_counts = _count(walk, 4 * (at + 1))
    # Diagonals 0, 1, 2 ... without a gap hold whatever lies in so many tiles up to the own one.
    unbroken = (diagonals == torch.arange(width, device=diagonals.device)).sum(-1, keepdim=True)
    column_counts = _count(index.columns, (at + 1 - unbroken).clamp(min=0) * TILE)
    return walk, walk_counts, held, column_counts


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
