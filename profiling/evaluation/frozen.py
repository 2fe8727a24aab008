"""An index of one prompt as columns and diagonals that hold for every prompt (MInference 1.0, "Ours w/ static").

Shapes: R query tiles, N key tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.index import PAD, TILE, SparseIndex
from kernels.patterns import freeze


class Frozen(NamedTuple):
    """Key columns, in tokens, and diagonals of tiles, as distances from the query's own tile; both ascending."""

    columns: tuple[int, ...]
    diagonals: tuple[int, ...]


def frozen(index: SparseIndex) -> list[Frozen]:
    """Of each head of a batch of one what it computes on any prompt.

    Columns and diagonals stay as they are. A head that lists tiles row by row, which fit its own prompt alone, gets as
    many tiles again, in the columns and diagonals of tiles that hold most of its own for what they cost.
    """
    made, listed = [], index.listed()
    for head in range(index.num_heads):
        tiles = listed[0, head]
        if bool((tiles != PAD).any()):
            made.append(_projected(tiles, index.first_row))
        else:
            one = SparseIndex(
                q_len=index.q_len,
                k_len=index.k_len,
                diagonals=index.diagonals[:1, head : head + 1],
                tiles=index.tiles,
                offsets=index.offsets[:1, head : head + 1],
                columns=index.columns[:1, head : head + 1],
            )
            static = freeze(one)[0]
            made.append(Frozen(static.columns, static.diagonals))
    return made


def _projected(tiles: Tensor, first_row: int) -> Frozen:
    """Columns and diagonals for the key tiles (R, any width) of each row; the row's own and the first come free."""
    rows, device = tiles.shape[0], tiles.device
    n = first_row + rows
    own = torch.arange(first_row, n, device=device)[:, None]
    held = torch.zeros(rows, n + 1, dtype=torch.bool, device=device)
    held.scatter_(1, torch.where(tiles < own, tiles, n).long(), True)
    left = held[:, :n]
    budget = int(left.sum())
    left[:, 0] = False
    at = torch.arange(n, device=device)
    distance = own - at
    behind = distance > 0
    columns, diagonals = [0], [0]
    spent = int(behind[:, 0].sum())
    behind[:, 0] = False
    while spent < budget and bool(left.any()):
        # Held tiles for each tile computed, for every column and every diagonal.
        places = distance.clamp_min(0)
        by_column = left.sum(0) / behind.sum(0).clamp_min(1)
        by_diagonal = torch.zeros(n, device=device).scatter_add_(0, places.flatten(), (left & behind).float().flatten())
        by_diagonal /= (
            torch.zeros(n, device=device).scatter_add_(0, places.flatten(), behind.float().flatten()).clamp_min(1)
        )
        if float(by_column.max()) >= float(by_diagonal.max()):
            best = int(by_column.argmax())
            columns.append(best)
            new = at.expand(rows, n) == best
        else:
            best = int(by_diagonal.argmax())
            diagonals.append(best)
            new = distance == best
        spent += int((new & behind).sum())
        left &= ~new
        behind = behind & ~new
    tokens = sorted(place for column in columns for place in range(column * TILE, (column + 1) * TILE))
    return Frozen(tuple(tokens), tuple(sorted(diagonals)))
