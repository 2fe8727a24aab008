"""One index from several, of sequences of unlike lengths.

Shapes: B batch, H query heads, R query tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.index import PAD, SparseIndex
from kernels.ragged import Ragged


def concat_sequences(parts: Sequence[SparseIndex], ragged: Ragged) -> SparseIndex:
    """One index over a ragged batch from one for each of its sequences, all of the same heads."""
    widths = tuple(
        tuple(map(max, *sorts, sorts[0]))
        for sorts in zip(*(part.widths() for part in parts), strict=True)
    )
    lengths = {"q_len": max(ragged.q_lens), "k_len": max(ragged.k_lens)}
    return _changed(parts, widths, **_joined(parts), **lengths, ragged=ragged)


def _joined(parts: Sequence[SparseIndex]) -> dict[str, Tensor]:
    """The entries of all parts, padded to the widest, their lists, and their bounds, if any."""
    fields = _lists(parts)
    for name in ("diagonals", "columns"):
        entries: list[Tensor] = [getattr(part, name) for part in parts]
        width = max(e.shape[-1] for e in entries)
        fields[name] = torch.cat([_pad(e, width) for e in entries])
    if any(part.skip is not None for part in parts):
        fields["skip"] = torch.cat([_bounds(part) for part in parts])
    return fields


def _pad(entries: Tensor, width: int) -> Tensor:
    """The entries padded to a width; to pad by nothing would be to copy."""
    if entries.shape[-1] == width:
        return entries
    return pad(entries, (0, width - entries.shape[-1]), value=PAD)


def _bounds(part: SparseIndex) -> Tensor:
    """The bound of each head, -inf where it skips nothing."""
    if part.skip is not None:
        return part.skip
    heads = part.diagonals.shape[:2]
    return part.diagonals.new_full(heads, -torch.inf, dtype=torch.float32)


def _lists(parts: Sequence[SparseIndex]) -> dict[str, Tensor]:
    """The lists of all parts end to end; rows that a part does not have are empty."""
    tiles: list[Tensor] = []
    offsets = []
    rows = max(part.offsets.shape[-1] for part in parts)
    for part in parts:
        at = part.offsets
        if missing := rows - at.shape[-1]:
            at = torch.cat([at, at[..., -1:].expand(-1, -1, missing)], -1)
        if len(part.tiles):
            if tiles:
                at = at + sum(map(len, tiles))
            tiles.append(part.tiles)
        offsets.append(at)
    if len(tiles) > 1:
        tiles = [torch.cat(tiles)]
    every_tile, *_ = (*tiles, parts[0].tiles)
    return {"tiles": every_tile, "offsets": torch.cat(offsets)}


def _changed(
    parts: Sequence[SparseIndex], widths: tuple[tuple[int, ...], ...], **fields: Any
) -> SparseIndex:
    """The first part with other fields; known to be valid only if all parts are."""
    if all(part._valid for part in parts):
        first = parts[0]
    else:
        first = replace(parts[0])
    index = first.changed(**fields)
    object.__setattr__(index, "_widths", widths)
    return index
