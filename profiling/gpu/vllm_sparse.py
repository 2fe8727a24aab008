"""vLLM's `sparse_attn_func`, MInference's vertical-slash kernel in FlashAttention-2, over an index's entries.

Shapes: B batch, H query heads, S length, D head dim, R query tiles, W most tiles of a row, C columns.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kernels.index import PAD, TILE, SparseIndex

_MODULE = "vllm.vllm_flash_attn.flash_attn_interface"


def missing() -> str | None:
    """What it takes and is not there; None where all is. vLLM's build for CPUs has the function without the kernel."""
    if find_spec("vllm") is None:
        return "vllm is not installed"
    try:
        import_module(_MODULE)
    except ImportError as error:
        return f"{_MODULE} cannot be imported: {error}"
    if not hasattr(torch.ops._vllm_fa2_C, "fwd_sparse"):
        return "this vllm has no kernel fwd_sparse"
    return None


def entries(index: SparseIndex) -> dict[str, Tensor]:
    """What the function calls an index of as many queries as keys: int32 counts (B, H, R), offsets and columns.

    block_offset (B, H, R, W): the first key of each tile of a row, ascending; column_index (B, H, R, C): the columns
    before a row's own tile that lie in none of its tiles. What is not counted is 0.
    """
    held = torch.cat([tiles for _, tiles in index.row_masks()], dim=2)
    n = held.shape[-1]
    tile = torch.arange(n, device=held.device)
    first = torch.where(held, tile * TILE, PAD).sort(dim=-1).values[..., : int(held.sum(-1).max())]
    column = index.columns.long()
    lies = column.clamp_max(index.k_len - 1) // TILE
    alone = ~held.gather(-1, lies[:, :, None].expand(-1, -1, n, -1))
    alone &= column[:, :, None] < tile[:, None] * TILE
    columns = torch.where(alone, column[:, :, None], PAD).sort(dim=-1).values
    return {
        name: x.to(torch.int32).contiguous()
        for name, x in (
            ("block_count", held.sum(-1)), ("block_offset", first.where(first < PAD, 0)),
            ("column_count", alone.sum(-1)), ("column_index", columns.where(columns < PAD, 0)),
        )
    }  # fmt: skip


def attention(q: Tensor, k: Tensor, v: Tensor, index: SparseIndex) -> Callable[[], Tensor]:
    """A call over the keys that the index names, its entries laid out beforehand; q, k, v and out are (B, heads, S, D).

    Raises:
        RuntimeError: something is missing.
    """
    if reason := missing():
        raise RuntimeError(reason)
    sparse: Any = import_module(_MODULE).sparse_attn_func
    laid_out = entries(index)
    # It wants heads after positions.
    queries, keys, values = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    return lambda: sparse(queries, keys, values, **laid_out, causal=True).transpose(1, 2)
