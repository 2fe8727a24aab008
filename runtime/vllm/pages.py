"""Where a parent's cache keeps keys and values, and how kernels get at them.

Shapes: P pages of the cache, N pages of a sequence, S tokens of a page, G KV heads, K key length, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from artifacts import HeadwiseError


class Keys(NamedTuple):
    """Keys and values of one sequence: as tensors, or in pages that a block table names.

    dense: (1, G, K, D) keys, which indices are built from; of no content where none reads them.
    k and v: what attention reads: (1, G, K, D), or caches (P, S, G, D) with `table` (1, N) int32.
    """

    dense: Tensor
    k: Tensor
    v: Tensor
    table: Tensor | None = None


# From a cache (P, G, S, 2 * D), the pages of a sequence (N,), K, and whether an index reads the keys, to the keys.
Reader = Callable[[Tensor, Tensor, int, bool], Keys]


def given(key: Tensor, value: Tensor) -> Keys:
    """The keys of a sequence that has no others than those of this step: (K, G, D) each."""
    k, v = (x.transpose(0, 1)[None] for x in (key, value))
    return Keys(k, k, v)


def paged(cache: Tensor, pages: Tensor, k_len: int, read: bool = True) -> Keys:
    """Keys of a cache whose rows hold a token's key and then its value; attention reads them where they lie.

    read: whether the index to be built reads the keys: only then are they gathered.
    """
    k, v = cache.transpose(1, 2).split(cache.shape[-1] // 2, dim=-1)
    if read:
        dense = k[pages].flatten(0, 1)[:k_len].transpose(0, 1)[None]
    else:
        dense = k.new_empty(1).expand(1, k.shape[2], k_len, k.shape[3])
    return Keys(dense, k, v, pages[None])


class Packed:
    """Reads the cache of vLLM's CPU backend, which keeps a page as its own kernel wants it: transposed, or in tiles.

    How, depends on the processor, the type of the numbers and the sizes, and is vLLM's own matter: so numbers are
    written through the parent's own function and looked for in the page. That is done once for each kind of layer.
    """

    def __init__(self, write: Callable[[Tensor, Tensor, Tensor, Tensor], None], cache: Tensor) -> None:
        """Learn the layout of a cache (P, G, S, 2 * D).

        write: the parent's update of a cache: keys (T, G, D), values (T, G, D), a cache, and T slots in it.

        Raises:
            HeadwiseError: keys or values are not all there, or their places follow no rule.
        """
        self._size, self._dim = cache.shape[2], cache.shape[3] // 2
        # Of sizes and strides, how many say where a token is; the others say where its numbers are.
        self._depths = [0, 0]
        self._rules = [self._rule(write, cache, which) for which in (0, 1)]

    def __call__(self, cache: Tensor, pages: Tensor, k_len: int, read: bool = True) -> Keys:
        """See Reader; attention reads what is unpacked, whether the index does or not."""
        blocks = cache.index_select(0, pages)
        num_pages, heads, size, width = blocks.shape
        page = size * width
        both = []
        for sizes, strides, offset in self._rules:
            view = blocks.as_strided((heads, num_pages, *sizes), (page, heads * page, *strides), offset)
            both.append(view.reshape(1, heads, num_pages * self._size, self._dim)[:, :, :k_len])
        k, v = both
        return Keys(k, k, v)

    def rows(self, cache: Tensor, pages: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (1, G, C, D) of some tokens: (1, C) for all KV heads, or (G, C)."""
        num_pages, heads, size, width = cache.shape
        if not cache.is_contiguous():
            cache, pages = cache.index_select(0, pages), torch.arange(len(pages))
            num_pages = len(pages)
        page, head, within = pages[tokens // size].long(), torch.arange(heads)[:, None], (tokens % size).long()
        read = []
        for (sizes, strides, offset), depth in zip(self._rules, self._depths, strict=True):
            shape, steps = (num_pages, heads, *sizes), (heads * size * width, size * width, *strides)
            view = cache.as_strided(shape, steps, cache.storage_offset() + offset)
            at = torch.unravel_index(within, sizes[:depth])
            read.append(view[(page, head, *at)].reshape(1, heads, tokens.shape[-1], self._dim))
        return read[0], read[1]

    def _rule(
        self, write: Callable[[Tensor, Tensor, Tensor, Tensor], None], cache: Tensor, which: int
    ) -> tuple[list[int], list[int], int]:
        """Sizes, strides and offset of the view of a page in which keys (0) or values (1) are (S, D)."""
        offsets = self._places(write, cache.dtype, which)
        tokens = _steps(offsets[:, 0].tolist())
        self._depths[which] = len(tokens)
        steps = [*tokens, *_steps(offsets[0].tolist())]
        told = offsets[0, 0].view(1)
        for size, step in steps:
            told = (told[:, None] + torch.arange(size) * step).view(-1)
        if not torch.equal(told, offsets.view(-1)) or min(step for _, step in steps) < 1:
            raise HeadwiseError("vLLM's CPU cache is not understood: the places of tokens in a page follow no rule")
        return [size for size, _ in steps], [step for _, step in steps], int(offsets[0, 0])

    def _places(
        self, write: Callable[[Tensor, Tensor, Tensor, Tensor], None], dtype: torch.dtype, which: int
    ) -> Tensor:
        """Where in a page each number of the keys (0) or values (1) is kept, (S, D)."""
        count = self._size * self._dim
        numbers = torch.arange(count)
        found, seen = torch.zeros(2, 2 * count, dtype=torch.int64)
        # Every type holds whole numbers up to 256.
        for shift in range(0, count.bit_length(), 8):
            page = torch.zeros(1, 1, self._size, 2 * self._dim, dtype=dtype)
            parts = [torch.zeros(self._size, 1, self._dim, dtype=dtype) for _ in range(2)]
            parts[which] = ((numbers >> shift & 255) + 1).to(dtype).view_as(parts[which])
            write(parts[0], parts[1], page, torch.arange(self._size))
            written = page.view(-1).to(torch.int64)
            seen += written
            found += (written - 1).clamp_min(0) << shift
        places = seen.nonzero().view(-1)
        order = found[places].argsort()
        if not torch.equal(found[places][order], numbers):
            raise HeadwiseError(
                f"vLLM's CPU cache is not understood: {count} numbers were written, {len(places)} are there"
            )
        return places[order].view(self._size, self._dim)


def _steps(offsets: Sequence[int]) -> list[tuple[int, int]]:
    """(size, stride) of nested loops, outermost first, that walk these offsets as far as a rule goes."""
    if len(offsets) == 1:
        return []
    first, step = offsets[0], offsets[1] - offsets[0]
    run = next((i for i, offset in enumerate(offsets) if offset != first + i * step), len(offsets))
    while len(offsets) % run:
        run -= 1
    if run == 1:
        return [(len(offsets), step)]
    return [*_steps(offsets[::run]), (run, step)]


def packed(impl: Any, layer: Any, cache: Tensor) -> Packed:
    """How the cache of a layer of vLLM's CPU backend is read."""

    def write(key: Tensor, value: Tensor, page: Tensor, slots: Tensor) -> None:
        impl.do_kv_cache_update(layer, key, value, page, slots)

    return Packed(write, cache)
