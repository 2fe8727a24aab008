"""One index from several: of heads of unlike kinds, or of sequences of unlike lengths.

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


def cat_heads(parts: Sequence[SparseIndex], order: Tensor, host_order: Sequence[int]) -> SparseIndex:
    """One index from parts that hold some heads each; head i of the result is head order[i] of their concatenation.

    `order` lies where the parts do; `host_order` is the same on the host.
    """
    if len(parts) == 1:
        return parts[0]
    made = {name: entries.index_select(1, order) for name, entries in _joined(parts, 1).items()}
    tails = [n for part in parts for n in part.dense_tail or (0,) * part.num_heads]
    widths = [width for part in parts for width in part.widths()]
    return _changed(
        parts,
        tuple(widths[i] for i in host_order),
        **made,
        dense_tail=tuple(tails[i] for i in host_order) if any(tails) else (),
    )


def cat_sequences(parts: Sequence[SparseIndex], ragged: Ragged) -> SparseIndex:
    """One index over a ragged batch from one for each of its sequences, all of the same heads."""
    widths = tuple(tuple(map(max, *sorts, sorts[0])) for sorts in zip(*(part.widths() for part in parts), strict=True))
    lengths = {"q_len": max(ragged.q_lens), "k_len": max(ragged.k_lens)}
    return _changed(parts, widths, **_joined(parts, 0), **lengths, ragged=ragged)


def _joined(parts: Sequence[SparseIndex], dim: int) -> dict[str, Tensor]:
    """The entries of all parts, padded to the widest and the most rows, and their bounds where one has any."""
    rows = max(part.num_rows for part in parts)
    made = {}
    for name in ("diagonals", "tiles", "columns"):
        entries: list[Tensor] = [getattr(part, name) for part in parts]
        width = max(e.shape[-1] for e in entries)
        margins = [(0, width - e.shape[-1]) + ((0, rows - e.shape[2]) if e.dim() == 4 else ()) for e in entries]
        made[name] = torch.cat([pad(e, m, value=PAD) for e, m in zip(entries, margins, strict=True)], dim)
    if any(part.skip is not None for part in parts):
        skips = [
            part.diagonals.new_full(part.diagonals.shape[:2], -torch.inf, dtype=torch.float32)
            if part.skip is None
            else part.skip
            for part in parts
        ]
        made["skip"] = torch.cat(skips, dim)
    return made


def _changed(parts: Sequence[SparseIndex], widths: tuple[tuple[int, ...], ...], **fields: Any) -> SparseIndex:
    """The first part with other fields; its entries are known to be right only if all parts' are."""
    first = parts[0] if all(part._valid for part in parts) else replace(parts[0])
    index = first.changed(**fields)
    object.__setattr__(index, "_widths", widths)
    return index
