"""torch's FlexAttention on the mask of a SparseIndex: the strongest general baseline that torch has.

Shapes: B batch, H query heads, G KV heads, S length, D head dim, R query tiles, N key tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernels.index import TILE, SparseIndex, num_tiles


def flex_attention(q: Tensor, k: Tensor, v: Tensor, index: SparseIndex) -> Callable[[], Tensor]:
    """A compiled call over exactly the keys that the index names, its block mask made beforehand.

    q (B, H, S, D), k and v (B, G, S, D) -> (B, H, S, D). Tiles that the index names whole need no mask; the own tile
    and tiles that hold only single columns are masked inside.
    """
    from torch.nn.attention.flex_attention import BlockMask

    length, n = index.k_len, num_tiles(index.k_len)
    held = torch.cat([tiles for _, tiles in index.row_masks()], dim=2)
    columns = torch.zeros(index.batch, index.num_heads, length + 1, dtype=torch.bool, device=q.device)
    columns.scatter_(-1, index.columns.long().clamp_max(length), True)
    columns = columns[..., :length]
    padded = torch.nn.functional.pad(columns, (0, n * TILE - length))
    touched = padded.unflatten(-1, (n, TILE)).any(-1)[:, :, None]
    own = torch.eye(n, dtype=torch.bool, device=q.device)
    below = torch.ones(n, n, dtype=torch.bool, device=q.device).tril(-1)
    full = held & below
    partial = (touched & below & ~held) | own

    def visible(b: Tensor, h: Tensor, row: Tensor, col: Tensor) -> Tensor:
        return (held[b, h, row // TILE, col // TILE] | columns[b, h, col]) & (col <= row)

    mask = BlockMask.from_kv_blocks(
        *_lists(partial), *_lists(full), BLOCK_SIZE=TILE, mask_mod=visible, seq_lengths=(length, length)
    )
    return lambda: _compiled()(q, k, v, block_mask=mask, enable_gqa=True)


def _lists(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles each row has and which, those first: (B, H, R) and (B, H, R, N) int32."""
    order = tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1).to(torch.int32), order.to(torch.int32)


@cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)
