"""Offsets of the lists of query tiles in an index, counted from sizes: nothing is read back.

Shapes: B batch, h heads of one kind, R query tiles, T entries of all lists.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.copies import Copy, on_device
from kernels.kept import kept


def offsets_of(
    most: tuple[int, ...],
    batch: int,
    rows: int,
    first: int,
    device: torch.device,
    *,
    held: tuple[int, ...] = (),
) -> tuple[Tensor, int]:
    """Offsets of each row's list, (B, h, R + 1) int64, and the number of entries in all.

    Head i lists at most most[i] tiles, and no more than lie before the row's own, at key tile first
    + r; held[i] of those are never listed. Not to be written to."""
    offsets, total = _made(most, held or (0,) * len(most), batch, rows, first, device)
    return offsets.read(), total


@kept(lambda made: made[0].nbytes, 1 << 26)
def _made(
    most: tuple[int, ...],
    held: tuple[int, ...],
    batch: int,
    rows: int,
    first: int,
    device: torch.device,
) -> tuple[Copy, int]:
    with torch.inference_mode(False):
        before, limit, never = (
            torch.as_tensor(x, device="cpu") for x in (range(first, first + rows), most, held)
        )
        counts = torch.minimum(limit[:, None], (before - never[:, None]).clamp_min(0)).repeat(
            batch, 1
        )
        ends = counts.flatten().cumsum(0).view(batch * len(most), rows)
        made = torch.cat([ends[:, :1] - counts[:, :1], ends], dim=1).view(
            batch, len(most), rows + 1
        )
        return Copy.of(made, device), int(ends.max()) if made.numel() else 0


def put(tiles: Tensor, offsets: Tensor, lists: Tensor) -> None:
    """Write the lists (B, h, rows, any width) to their offsets (B, h, rows + 1).

    tiles (T + 1): its last entry takes what a list has no room for, which is padding.
    """
    at = offsets[..., :-1, None] + on_device(tuple(range(lists.shape[-1])), tiles.device)
    tiles.scatter_(
        0, torch.where(at < offsets[..., 1:, None], at, len(tiles) - 1).flatten(), lists.flatten()
    )
