"""How keys and values lie in the pages of a cache, and how kernels get at them.

Shapes: P pages of the cache, N pages of a sequence, S tokens of a page, G KV heads, T tokens, K key length, D head dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

# Tokens of a tile of our kernels: a page that holds one is read in one piece.
PAGE = 64
# From so many tokens on rows are found first and then written: fewer are put in one by one.
_MANY = 16


class Pages(NamedTuple):
    """Keys and values (P, S, G, D) of a layer's cache, and what they are to be multiplied by."""

    k: Tensor
    v: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def size(self) -> int:
        """Tokens of a page."""
        return self.k.shape[1]

    @classmethod
    def of(cls, layer: Any, cache: Tensor, ours: bool, stored: torch.dtype | None) -> Self:
        """The pages of a layer of vLLM in its cache (P, G, S, 2 * D), of bytes that hold `stored`; see parted."""
        if stored is None:
            return cls(*parted(cache, ours))
        return cls(*parted(cache.view(stored), ours), layer._k_scale_float, layer._v_scale_float)


def parted(cache: Tensor, ours: bool) -> tuple[Tensor, Tensor]:
    """Keys and values (P, S, G, D) of a cache (P, G, S, 2 * D).

    A head of a page holds the keys of all its tokens and then their values where the layout is ours, so that a tile of
    keys is one piece of memory; a token's key and then its value where it is that of vLLM's backends for GPUs.
    """
    pages, heads, size, width = cache.shape
    if not ours:
        k, v = cache.transpose(1, 2).split(width // 2, dim=-1)
        return k, v
    halves = cache.view(pages, heads, 2, size, width // 2)
    return halves[:, :, 0].transpose(1, 2), halves[:, :, 1].transpose(1, 2)


def quantised(x: Tensor, scale: float, stored: torch.dtype) -> Tensor:
    """x / scale in 8 bits, as the bytes that vLLM's caches have; what is too large becomes the largest number."""
    most = torch.finfo(stored).max
    return (x.float() / scale).clamp(-most, most).to(stored).view(torch.uint8)


def store(cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Write keys and values (T, G, D) into a cache (P, G, S, 2 * D) of ours; slots (T,), negative ones are padding."""
    _, heads, size, width = cache.shape
    # vLLM's first page belongs to nobody.
    slots = slots.clamp_min(0)
    page, row = slots // size, slots % size
    if len(slots) < _MANY or not cache.is_contiguous():
        for held, new in zip(parted(cache, ours=True), (key, value), strict=True):
            held[page, row] = new[: len(slots)]
        return
    flat = cache.view(-1, width // 2)
    rows = ((page[:, None] * heads + torch.arange(heads)) * (2 * size) + row[:, None]).view(-1)
    for at, new in ((rows, key), (rows + size, value)):
        flat.index_copy_(0, at, new[: len(slots)].reshape(-1, width // 2))
