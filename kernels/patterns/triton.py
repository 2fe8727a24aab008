"""What builders do to whole prompts, in Triton on GPUs: prepares and launches triton_kernels.py.

In torch the estimate writes the attention of the last queries out, four bytes a key for each of them, and reads it
again several times; here it stays on the chip. torch's topk reads a row of scores up to a dozen times; here it is read
once. Means over tiles stay in torch: they read each number once in any case.

Shapes: B batch, H query heads, h heads asked for, G KV heads, Q query length, K key length, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.attention.triton_launch import architecture, choose, split, unavailable
from kernels.breaker import failure
from kernels.copies import on_device
from kernels.dispatch import say_once
from kernels.index import PAD, TILE, num_tiles
from kernels.triton_calls import KernelCall, run_calls

_MODULE = f"{__package__}.triton_kernels"
_LOG2E = 1.4426950408889634
_MAX_DIM = 256
# The widest heads of which two at a time fit the smaller shared memories.
_MOST_FOR_TWO = 128
# Programs that keep every GPU busy to the end, and chunks of keys whose sums are put together afterwards.
_PROGRAMS = 1024
_MOST_CHUNKS = 64


# Rows that the first level of cache holds, and what a program takes of one at a time.
_MOST_PLACES = 1 << 16
_CHUNK = 2048


def serves(x: Tensor) -> bool:
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
    """Whether Triton makes this choice: short rows on a GPU, none of them by mass."""
    short = 0 < scores.shape[-1] <= _MOST_PLACES and scores.numel() > 0
    wanted = short and all(share is None for share in coverage)
    return wanted and unavailable(scores.device) is None and _built(scores.device)


def best_places(scores: Tensor, sizes: Sequence[int], *, forced: int) -> Tensor:
    """See kernels.patterns.choose.best_places."""
    places, launch = choice(scores, sizes, forced=forced)
    _run(launch, scores.device)
    return places


def choice(scores: Tensor, sizes: Sequence[int], *, forced: int) -> tuple[Tensor, KernelCall]:
    """Memory for the places, and the launch that fills it."""
    n = scores.shape[-1]
    width, chunk = min(max(sizes), n), min(max(128, 1 << (n - 1).bit_length()), _CHUNK)
    places = torch.empty(*scores.shape[:-1], width, dtype=torch.int32, device=scores.device)
    arguments = {
        "scores": scores.contiguous(), "sizes": on_device(tuple(sizes), scores.device), "places": places,
        "heads": scores.shape[1], "rows": scores.shape[2:-1].numel(), "n": n, "width": width,
    }  # fmt: skip
    return places, KernelCall(
        module=_MODULE,
        kernel="best_places_kernel",
        grid=(scores.shape[:-1].numel(),),
        arguments=arguments,
        constants={"FORCED": forced, "PAD": PAD, "CHUNK": chunk},
        options={"num_warps": max(1, chunk // 512), "enable_fp_fusion": True},
    )


def estimate(
    q: Tensor, k: Tensor, heads: Sequence[int], last_q: Sequence[int], *, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """See kernels.patterns.last_queries.estimate. The sums have an order of their own, each time the same."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    how = plan(q, k, heads, last_q, scale=scale, window=window)
    shape, seen = (q.shape[0], len(heads)), how.arguments["tiles"] * TILE
    partial = torch.empty(*shape, how.blocks * TILE, how.chunks, dtype=torch.float32, device=q.device)
    _run(how.normalisers(partial), q.device)
    partial = partial.logsumexp(-1)
    # Nobody writes to keys that no query sees.
    vertical, slash = torch.zeros(2, *shape, k.shape[2], dtype=torch.float32, device=q.device)
    near, far = torch.empty(2, *shape, seen, dtype=torch.float32, device=q.device)
    for block in range(how.blocks):
        _run(how.masses(block, partial, vertical, near, far), q.device)
    seen = min(seen, k.shape[2])
    torch.add(near[..., :seen], far[..., :seen], out=slash[..., :seen])
    return vertical, slash


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An estimate cut up into launches: what they have in common, blocks of 64 queries, and chunks of key tiles."""

    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, Any]
    programs: int
    blocks: int
    chunks: int

    def normalisers(self, partial: Tensor) -> KernelCall:
        """The log-sum-exp of each query over each chunk, to `partial` (B, h, blocks * 64, chunks)."""
        return KernelCall(
            module=_MODULE,
            kernel="normalisers_kernel",
            grid=(self.programs, self.blocks),
            arguments=self.arguments | {"normalisers": partial},
            constants=self.constants,
            options=self.options,
        )

    def masses(self, block: int, normalisers: Tensor, vertical: Tensor, near: Tensor, far: Tensor) -> KernelCall:
        """The masses of one block of queries, added to those of the blocks before it."""
        tensors = {"normalisers": normalisers, "vertical": vertical, "near": near, "far": far}
        return KernelCall(
            module=_MODULE,
            kernel="masses_kernel",
            grid=(self.programs,),
            arguments=self.arguments | tensors | {"block": block},
            constants=self.constants | {"ADD": block > 0},
            options=self.options,
        )


def plan(
    q: Tensor,
    k: Tensor,
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
    members = _members(heads, last, group_size, 2 if dim <= _MOST_FOR_TWO else 1)
    seen = k_len if window is None else min(k_len, max(last) + window - 1)
    tiles, blocks, groups = num_tiles(seen), num_tiles(max(last)), len(members)
    chunk = -(-tiles // min(_MOST_CHUNKS, -(-_PROGRAMS // (batch * groups))))
    chunks = -(-tiles // chunk)
    arguments: dict[str, Any] = {
        "q": q, "k": k,
        "members": on_device(tuple(n for group in members for member in group for n in member), q.device),
        "scale": scale * _LOG2E, "heads": len(heads), "groups": groups, "group_size": group_size,
        "q_len": q_len, "k_len": k_len, "tiles": tiles, "chunk": chunk, "chunks": chunks, "rows": blocks * TILE,
        "window": window or 0,
    }  # fmt: skip
    for name, x in (("q", q), ("k", k)):
        arguments |= {f"{name}_{axis}": x.stride(i) for i, axis in enumerate(("batch", "head", "row"))}
    constants = {
        **dict(zip(("D", "D0", "D1"), (dim, *split(dim)), strict=True)),
        "MEMBERS": len(members[0]), "WINDOW": window is not None and window < k_len,
    }  # fmt: skip
    build = choose(target or architecture(q.device), dim=dim, itemsize=q.element_size(), has_tiles=False)
    warps = 8 if len(members[0]) == 2 or dim > _MOST_FOR_TWO else 4
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


def _run(call: KernelCall, device: torch.device) -> None:
    run_calls([call], device, "builders", str(device))
