"""A layer's index in a few launches on a GPU: what its heads read of the prompt and choose, straight to its place.

What does not depend on the prompt is laid out once for each length, on any device: entries of fixed patterns, and where
lists begin. Layers with the same patterns share it.

Shapes: B batch, H query heads, R query tiles, N key tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.breaker import CannotBuildError
from kernels.copies import Copy
from kernels.index import PAD, SparseIndex, empty_entries, no_lists, num_rows, num_tiles
from kernels.joining import cat_heads
from kernels.kept import kept
from kernels.patterns import cpu, triton
from kernels.patterns.base import Pattern
from kernels.patterns.block_sparse import BlockSparse, chunks
from kernels.patterns.dense import Dense
from kernels.patterns.fixed import Fixed
from kernels.patterns.paged import Keys
from kernels.patterns.rows import offsets_of
from kernels.patterns.skip_softmax import SkipSoftmax
from kernels.patterns.vertical_slash import VerticalSlash

# Kinds whose index depends on nothing but lengths.
_LAID_OUT = (Dense, Fixed, SkipSoftmax)
_SERVED = (*_LAID_OUT, VerticalSlash, BlockSparse)
_Heads = dict[type[Pattern], list[int]]
_Kinds = tuple[tuple[type[Pattern], tuple[int, ...], tuple[Pattern, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """An index without what is chosen: its shapes, without memory, and its parts on the device.

    entries: diagonals, then columns, in one tensor; offsets: None where no head lists tiles, `total` of them.
    """

    index: SparseIndex
    entries: Copy
    offsets: Copy | None
    skip: Copy | None
    total: int

    @property
    def nbytes(self) -> int:
        """Of what it holds on the device."""
        return sum(copy.nbytes for copy in (self.entries, self.offsets, self.skip) if copy is not None)

    def fields(self) -> dict[str, Any]:
        """What changes hands of it, to be read only but for the tiles, which are nobody's yet."""
        entries, index = self.entries.read(), self.index
        lists = (
            no_lists(index.batch, index.num_heads, index.num_rows, device=entries.device)
            if self.offsets is None
            else {
                "offsets": self.offsets.read(),
                "tiles": torch.empty(self.total, dtype=torch.int32, device=entries.device),
            }
        )
        return {
            "diagonals": entries[: index.diagonals.numel()].view(index.diagonals.shape),
            "columns": entries[_begin(index) :].view(index.columns.shape),
            **lists,
        }

    def with_fields(self, fields: Mapping[str, Tensor]) -> SparseIndex:
        """The index on the device."""
        index = self.index
        return SparseIndex.built(
            widths=index.widths(), q_len=index.q_len, k_len=index.k_len, **fields, dense_tail=index.dense_tail,
            skip=None if self.skip is None else self.skip.read(),
        )  # fmt: skip


def _begin(index: SparseIndex) -> int:
    """Where columns begin behind diagonals: at a multiple of 16 bytes, as Triton likes tensors to."""
    return -(-index.diagonals.numel() // 4) * 4


def build(
    patterns: Sequence[Pattern],
    kinds: Mapping[type[Pattern], Sequence[int]],
    q: Tensor,
    k: Keys,
    *,
    scale: float,
    window: int | None,
) -> tuple[list[int], SparseIndex] | None:
    """The heads of a layer that these launches are for, and their index, as LayerPlan.build says; None without any.

    They choose columns, diagonals and tiles by number, not by mass, and read half precision on a GPU; or choose nothing
    and are beside some that do, or of several kinds, on any device.
    """
    served: _Heads = {kind: _by_number(patterns, heads) for kind, heads in kinds.items() if issubclass(kind, _SERVED)}
    served = {kind: some for kind, some in served.items() if some}
    heads = sorted(head for some in served.values() for head in some)
    chosen = bool({VerticalSlash, BlockSparse} & served.keys())
    if (cpu.serves(q) or not triton.serves(q)) if chosen else (len(served) < 2 or len(heads) < len(patterns)):
        return None
    key = tuple((kind, tuple(heads), tuple(patterns[head] for head in heads)) for kind, heads in served.items())
    layout = _layout(key, tuple(q.shape), k.shape[2], window, q.device)
    if not chosen:
        return heads, layout.with_fields(layout.fields())
    # Where a kernel turns out not to build, torch serves this call and those to come.
    with suppress(CannotBuildError):
        return heads, _build(patterns, served, heads, layout, q, k, scale, window)
    return None


def _by_number(patterns: Sequence[Pattern], heads: Sequence[int]) -> list[int]:
    """Those of the heads that choose by number, or nothing."""
    return [head for head in heads if getattr(patterns[head], "coverage", None) is None]


def _build(
    patterns: Sequence[Pattern],
    kinds: Mapping[type[Pattern], Sequence[int]],
    all_heads: Sequence[int],
    layout: _Layout,
    q: Tensor,
    k: Keys,
    scale: float,
    window: int | None,
) -> SparseIndex:
    made = layout.fields()
    lines = pooled = None
    some: Any
    # Where each head stands in the index.
    place = {head: at for at, head in enumerate(all_heads)}
    if listed := kinds.get(BlockSparse, ()):
        of = [head // (q.shape[1] // k.shape[1]) for head in listed]
        pooled = triton.means(q, k, listed, of, q_lead=(k.shape[2] - q.shape[2]) % 64)
    if heads := kinds.get(VerticalSlash, ()):
        some = [patterns[head] for head in heads]
        sizes = tuple((place[head], max(p.vertical, 64), max(p.slash, 64)) for head, p in zip(heads, some, strict=True))
        how: Any = {"scale": scale, "window": window, "beside": pooled}
        vertical, near, far = triton.masses(q, k, heads, [p.last_q for p in some], **how)
        laid_out = {name: made[name] for name in ("diagonals", "columns")}
        made |= {name: torch.empty_like(each) for name, each in laid_out.items()}
        others = tuple(place[head] for head in all_heads if head not in heads)
        lines = triton.Lines(vertical=vertical, near=near, far=far, heads=sizes, others=others, **laid_out)
    elif pooled is not None:
        triton.run(pooled.alone(), q.device)
    if pooled is not None:
        queries, keys = pooled.queries.flatten(0, 1), pooled.keys.flatten(0, 1)
        n = keys.shape[1]
        some = [patterns[head] for head in listed]
        beside = tuple((place[head], max(p.blocks, 2) - 1) for head, p in zip(listed, some, strict=True))
        reach = n - 1 if window is None else min(num_tiles(window - 1), n - 1)
        for part in chunks(queries.shape[1], 4 * len(queries) * n, q.device):
            first = layout.index.first_row
            # No row of the chunk sees a tile outside these.
            seen = slice(max(first + part.start - reach, 0), first + part.stop)
            scores = torch.bmm(queries[:, part], keys[:, seen].transpose(1, 2))
            where: Any = {"first": first, "row": part.start, "tile": seen.start}
            lists = triton.Lists(scores=scores, heads=beside, reach=reach, **where)
            triton.fill(made, lines, lists)
            lines = None
    else:
        triton.fill(made, lines, None)
    return layout.with_fields(made)


# Bytes of the layouts that are kept: those of 48 unlike layers at two lengths of 128K tokens.
_ROOM = 1 << 27


@kept(lambda layout: layout.nbytes, _ROOM)
def _layout(kinds: _Kinds, shape: tuple[int, ...], k_len: int, window: int | None, device: torch.device) -> _Layout:
    """What is the same for every prompt of a length; not to be written to."""
    batch, _, q_len, dim = shape
    parts: list[SparseIndex] = []
    order: list[int] = []
    host, n, total, rows = torch.device("cpu"), num_tiles(k_len), 0, num_rows(q_len, k_len)
    # Of queries and keys only shapes are looked at.
    q, k = (torch.empty(1).expand(batch, shape[1], length, dim) for length in (q_len, k_len))
    with torch.inference_mode(False):
        for kind, heads, patterns in kinds:
            order += heads
            if kind not in (VerticalSlash, BlockSparse):
                parts.append(kind.build_index(patterns, heads, q, k, scale=1.0, window=window))
                continue
            some: Any = patterns
            fields: dict[str, Any] = no_lists(batch, len(heads), rows, device=host)
            if kind is BlockSparse:
                reach = n - 1 if window is None else min(num_tiles(window - 1), n - 1)
                most = tuple(min(max(p.blocks, 2) - 1, reach) for p in some)
                offsets, total = offsets_of(most, batch, rows, (k_len - q_len) // 64, host)
                widths = tuple((1, width, 0) for width in most)
                fields = {"tiles": empty_entries(total, device=host), "offsets": offsets}
            else:
                widths = tuple(
                    (min(n, 2 * min(max(p.slash, 64), k_len)), 0, min(max(p.vertical, 64), k_len)) for p in some
                )
            diagonals = torch.full((batch, len(heads), max(w[0] for w in widths)), PAD, dtype=torch.int32)
            diagonals[..., 0] = 0
            columns = torch.full((batch, len(heads), max(w[2] for w in widths)), PAD, dtype=torch.int32)
            parts.append(
                SparseIndex.built(
                    widths=widths, q_len=q_len, k_len=k_len, diagonals=diagonals, columns=columns, **fields
                )
            )
        place = sorted(range(len(order)), key=order.__getitem__)
        index = cat_heads(parts, torch.tensor(place), place)
        # An expanded tensor has no memory of its own to copy.
        skip = None if index.skip is None else Copy.of(index.skip.contiguous(), device)
        listing = any(kind is BlockSparse for kind, _, _ in kinds)
        lists = Copy.of(index.offsets.contiguous(), device) if listing else None
        diagonals, columns = index.diagonals.flatten(), index.columns.flatten()
        gap = diagonals.new_full((_begin(index) - len(diagonals),), PAD)
        entries = Copy.of(torch.cat([diagonals, gap, columns]), device)
        shapes: Any = {name: getattr(index, name).to("meta") for name in ("diagonals", "columns", "tiles", "offsets")}
        bare = SparseIndex.built(widths=index.widths(), q_len=q_len, k_len=k_len, **shapes, dense_tail=index.dense_tail)
    return _Layout(index=bare, entries=entries, offsets=lists, skip=skip, total=total)
