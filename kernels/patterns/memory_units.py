"""Memory units: sinks, a window, and tiles of the past looked up by a few keys (InfLLM).

Shapes: B batch, Q query length, K key length, D head dim, h heads of this kind, R query tiles, U
units: key tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from kernels.copies import on_device
from kernels.index import TILE, SparseIndex, num_tiles
from kernels.patterns.base import Builder, Inputs, Pattern
from kernels.patterns.block_sparse import mean_of_tiles
from kernels.patterns.choose import best_places, offsets_of, put
from kernels.patterns.fixed import counted, reach
from kernels.patterns.paged import Keys, of_heads, parts

# Bytes of fp32 scores held at once, and of running sums over queries.
_SCRATCH_BYTES = 1 << 26


@dataclass(frozen=True, kw_only=True)
class MemoryUnits(Pattern):
    """The first `sink` keys, a window of `window`, and `units` tiles of the past between them.

    A unit is a tile of TILE keys, and stands for itself by `representatives` of them: those that
    the queries of the window after them would attend to most, by the mean of the products (Xiao et
    al. 2024, InfLLM, section 3.2). Each query tile looks up the units whose representatives have
    the largest products with its queries (section 3.3). sink and window in tokens; the sinks are
    rounded up to whole tiles, the window as in an A-shape. Positions stay as they are, where InfLLM
    gives all units one."""

    kind: ClassVar[str] = "memory_units"

    sink: int
    window: int
    units: int
    representatives: int = 4

    @classmethod
    def prepare(cls, largest: Sequence[Self], inputs: Inputs) -> Builder:
        """See Pattern.prepare. Units depend on the window: they are made with each index."""
        heads, q, k, _, window = inputs
        q_len = q.shape[2]
        k_len = k.shape[2]
        queries = mean_of_tiles(q, heads, lead=(k_len - q_len) % TILE)

        def build(patterns: Sequence[Self]) -> SparseIndex:
            units = _units(q, k, heads, patterns)
            return select(queries, units, patterns, q_len=q_len, k_len=k_len, window=window)

        return build


def _units(q: Tensor, k: Keys, heads: Sequence[int], patterns: Sequence[MemoryUnits]) -> Tensor:
    """Representatives (B, h, U, D) of some heads, those of one size together, as room allows."""
    group = q.shape[1] // k.shape[1]
    alike: dict[tuple[int, int], list[int]] = {}
    for place, p in enumerate(patterns):
        alike.setdefault((p.window, p.representatives), []).append(place)
    at_once = max(1, _SCRATCH_BYTES // (8 * q.shape[0] * k.shape[2] * k.shape[3]))
    made = []
    order = []
    for (window, count), places in alike.items():
        for start in range(0, len(places), at_once):
            some = places[start : start + at_once]
            mine = tuple(heads[place] for place in some)
            first = min(mine) // group
            last = max(mine) // group
            queries = q.index_select(1, on_device(mine, q.device))
            kv_heads = on_device(tuple(head // group - first for head in mine), q.device)
            made.append(
                representatives(
                    queries, of_heads(k, slice(first, last + 1)), kv_heads, window, count
                )
            )
            order += some
    if len(made) == 1:
        return made[0]
    back = sorted(range(len(order)), key=order.__getitem__)
    return torch.cat(made, dim=1).index_select(1, on_device(tuple(back), q.device))


def select(
    queries: Tensor,
    units: Tensor,
    patterns: Sequence[MemoryUnits],
    *,
    q_len: int,
    k_len: int,
    window: int | None,
) -> SparseIndex:
    """The index of each row's best units by mean queries (B, h, R, D) and representatives.

    Representatives are (B, h, U, D); both are fp32.
    """
    (batch, heads, rows, _) = queries.shape
    n = units.shape[2]
    device = queries.device
    first = (k_len - q_len) // TILE
    back, sinks = (
        [f(p) for p in patterns]
        for f in (lambda p: reach(p.window, k_len), lambda p: min(num_tiles(p.sink), n))
    )
    most = tuple(min(p.units, n) for p in patterns)
    held = tuple(map(sum, zip(back, sinks, strict=True)))
    offsets, total = offsets_of(most, batch, rows, first, device, held=held)
    tiles = torch.empty(total + 1, dtype=torch.int32, device=device)
    near, after = (on_device(tuple(each), device)[:, None, None] for each in (back, sinks))
    if window is None:
        seen = n
    else:
        seen = reach(window, k_len)
    unit = torch.arange(n, device=device)
    step = max(1, _SCRATCH_BYTES // (4 * batch * heads * n))
    for start in range(0, rows, step):
        some = slice(start, min(start + step, rows))
        own = torch.arange(some.start, some.stop, device=device)[:, None] + first
        scores = queries[:, :, some] @ units.transpose(2, 3)
        scores.masked_fill_(
            (unit < after) | (unit >= own - near) | (unit < own - seen), float("-inf")
        )
        best = best_places(scores, [p.units for p in patterns], [None] * heads, forced=0)
        put(tiles, offsets[:, :, some.start : some.stop + 1], best)
    columns = [min(s * TILE, k_len) for s in sinks]
    return SparseIndex.built(
        widths=tuple(zip((b + 1 for b in back), most, columns, strict=True)),
        q_len=q_len,
        k_len=k_len,
        diagonals=counted([b + 1 for b in back], [1] * heads, device)
        .expand(batch, -1, -1)
        .contiguous(),
        tiles=tiles[:total],
        offsets=offsets,
        columns=counted(columns, [1] * heads, device).expand(batch, -1, -1).contiguous(),
    )


def representatives(q: Tensor, k: Keys, kv_heads: Tensor, window: int, count: int) -> Tensor:
    """Mean of each unit's `count` best keys by mean product with the queries after them.

    q (B, h, Q, D) and k (B, G, K, D), of which each head reads the one that `kv_heads` (h,) says.
    Only queries of the call within `window` of a key count; keys that none follows are all alike.
    """
    q_len = q.shape[2]
    k_len = k.shape[2]
    window = min(window, k_len)
    # Sums over windows are differences of running sums, which fp32 would round away.
    sums = torch.nn.functional.pad(q.to(torch.float64).cumsum(2), (0, 0, 1, 0))
    found = []
    at = 0
    for keys in parts(k):
        after = torch.arange(at, at + keys.shape[2], device=q.device) - (k_len - q_len) + 1
        start = after.clamp(0, q_len)
        stop = (after + window).clamp(0, q_len)
        local = (sums.index_select(2, stop) - sums.index_select(2, start)) / (
            stop - start
        ).clamp_min(1)[:, None]
        found.append(_best_of_tiles(local.float(), keys.index_select(1, kv_heads).float(), count))
        at += keys.shape[2]
    return torch.cat(found, dim=2)


def _best_of_tiles(local: Tensor, keys: Tensor, count: int) -> Tensor:
    """Mean of each tile's `count` keys (B, h, n, D) of the largest products with `local`, fp32."""
    relevance = (local * keys).sum(-1)
    n = num_tiles(keys.shape[2])
    missing = -keys.shape[2] % TILE
    relevance = torch.nn.functional.pad(relevance, (0, missing), value=float("-inf")).unflatten(
        2, (n, TILE)
    )
    keys = torch.nn.functional.pad(keys, (0, 0, 0, missing)).unflatten(2, (n, TILE))
    best = relevance.topk(min(count, TILE), dim=-1)
    held = (best.values > float("-inf")).float()[..., None]
    chosen = keys.gather(3, best.indices[..., None].expand(*best.indices.shape, keys.shape[-1]))
    return (chosen * held).sum(3) / held.sum(3)
