"""Device code of the builders that choose by means; kernels.patterns.triton launches it.

Imports triton. Shapes: B batch, h heads asked for, D head dim.

Means are of tiles on the grid of positions, counted from the first. If PAGE > 0, keys lie in pages
of PAGE tokens: k_batch is the stride of a page, and `pages` (B, pages_width) int32 names the page
that holds keys i * PAGE and on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.triton_step import TILE, load_rows


@triton.jit
def element_of(k, pages, batch, k_batch, pages_width, PAGE: tl.constexpr):
    """The keys and the pages of an element of the batch."""
    if PAGE == 0:
        k += batch * k_batch
    else:
        pages += batch * pages_width
    return k, pages


@triton.jit
def rows_of(k, pages, start, last, present, k_page, k_row, PAGE: tl.constexpr):
    """Base and offsets of 64 keys from `start` on; `last` is the last that exists.

    They touch two pages at most; only smaller ones need a look-up for each row. Select
    first, then multiply by the stride (kernels.attention.triton_step).
    """
    column = tl.arange(0, TILE)
    if PAGE == 0:
        k += start.to(tl.int64) * k_row
        rows = column * k_row
    else:
        key = start + column
        if PAGE < 64:
            page = tl.load(pages + key // PAGE, mask=present, other=0)
        else:
            first = tl.maximum(start, 0) // PAGE
            page = tl.where(
                key < (first + 1) * PAGE, tl.load(pages + first), tl.load(pages + last // PAGE)
            )
        rows = page.to(tl.int64) * k_page + (key % PAGE).to(tl.int64) * k_row
    return k, rows


@triton.jit
def _store_mean(
    x, rows, present, count, means, entry, tiles, FIRST: tl.constexpr, WIDTH: tl.constexpr,
    D: tl.constexpr
):  # fmt: skip
    """The mean of elements FIRST ... FIRST + WIDTH of some rows, to all places of a head."""
    column = FIRST + tl.arange(0, WIDTH)
    mean = tl.sum(load_rows(x, rows, present, FIRST, WIDTH, D, True).to(tl.float32), 0) / count
    for place in tl.range(tl.load(entry + 1), tl.load(entry + 2)):
        tl.store(means + (place * tiles).to(tl.int64) * D + column, mean, mask=column < D)


@triton.jit(do_not_specialize=["heads", "wanted", "tiles", "length", "lead"])
def means_kernel(
    x, pages, means, places, x_batch, x_head, x_row, pages_width, heads, wanted, tiles, length,
    lead,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Means over tiles of keys, (B, heads, tiles, D) fp32; `lead` rows of the first miss.

    places (wanted, 3): a head of x and the range of places in means that its own go to.
    """
    at = tl.program_id(0)
    tile = at % tiles
    entry = places + at // tiles % wanted * 3
    batch = (at // tiles // wanted).to(tl.int64)
    x, pages = element_of(x, pages, batch, x_batch, pages_width, PAGE)
    start = tile * TILE - lead
    last = tl.minimum(start + TILE, length) - 1
    row = start + tl.arange(0, TILE)
    present = (row >= 0) & (row <= last)
    x, rows = rows_of(
        x + tl.load(entry).to(tl.int64) * x_head, pages, start, last, present, x_batch, x_row, PAGE
    )
    count = (last - tl.maximum(start, 0) + 1).to(tl.float32)
    means += (batch * heads * tiles + tile) * D
    _store_mean(x, rows, present, count, means, entry, tiles, 0, D0, D)
    if D1 > 0:
        _store_mean(x, rows, present, count, means, entry, tiles, D0, D1, D)
