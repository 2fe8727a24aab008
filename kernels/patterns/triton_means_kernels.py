"""Device code of the builders that choose by means; kernels.patterns.triton launches it.

Imports triton. Shapes: B batch, h heads asked for, D head dim.

Means are of tiles, or of parts of them, on the grid of positions, counted from the first. If PAGE >
0, keys lie in pages of so many tokens: k_batch is the stride of a page, and `pages` (B,
pages_width) int32 says which page holds keys i * PAGE and on."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.triton_step import LOWEST, TILE, load_rows, load_some


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

    They touch two pages at most; only smaller ones need a look-up for each row. What is selected is
    multiplied by a stride afterwards (kernels.attention.triton_step)."""
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
def _store_means(
    x, rows, present, counts, means, entry, blocks, FIRST: tl.constexpr, WIDTH: tl.constexpr,
    D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Means (PARTS) of elements FIRST ... FIRST + WIDTH of 64 rows, to all places of a head."""
    column = FIRST + tl.arange(0, WIDTH)
    loaded = load_rows(x, rows, present, FIRST, WIDTH, D, True).to(tl.float32)
    sums = tl.sum(tl.reshape(loaded, (PARTS, TILE // PARTS, WIDTH)), 1)
    mean = sums / tl.maximum(counts, 1).to(tl.float32)[:, None]
    at = tl.arange(0, PARTS)[:, None] * D + column[None, :]
    for place in tl.range(tl.load(entry + 1), tl.load(entry + 2)):
        to = means + (place * blocks).to(tl.int64) * D
        tl.store(to + at, mean, mask=(at >= 0) & (column < D)[None, :])


@triton.jit(do_not_specialize=["heads", "wanted", "tiles", "length", "lead"])
def means_kernel(
    x, pages, means, places, x_batch, x_head, x_row, pages_width, heads, wanted, tiles, length,
    lead,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Means over PARTS of each tile of keys, (B, heads, tiles * PARTS, D) fp32; 0 of no keys.

    `lead` rows of the first tile miss. places (wanted, 3): a head of x and the range of places in
    means that its own go to.
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
    counts = tl.sum(tl.reshape(present.to(tl.int32), (PARTS, TILE // PARTS)), 1)
    blocks = tiles * PARTS
    means += (batch * heads * blocks + tile * PARTS) * D
    _store_means(x, rows, present, counts, means, entry, blocks, 0, D0, D, PARTS)
    if D1 > 0:
        _store_means(x, rows, present, counts, means, entry, blocks, D0, D1, D, PARTS)


# Elements of fp32 means that are multiplied at a time: more, or loops unrolled, spill registers.
_WIDTH = tl.constexpr(16)


@triton.jit
def _products(q, k, row, key, has_row, has_key, scale, D: tl.constexpr):
    """Scaled products (64, 64) of fp32 means, powers of two."""
    products = tl.zeros([TILE, TILE], tl.float32)
    for first in tl.range(0, D, _WIDTH):
        asked = load_some(q, row * D, has_row, first, _WIDTH, D, True)
        held = load_some(k, key * D, has_key, first, _WIDTH, D, True)
        products = tl.dot(asked, tl.trans(held), products, input_precision="ieee")
    return products * scale


@triton.jit(
    do_not_specialize=["present", "absent", "start", "rows", "first", "begin", "reach", "tiles"]
)
def tile_masses_kernel(
    q, k, scores, q_head, k_head, scale,
    present, absent, start, rows, first, begin, reach, tiles,
    D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Attention of mean queries to mean keys, summed by tiles: (B * h, rows, 1 + tiles) fp32.

    A program has 64 mean queries, those of 64 // PARTS of the query tiles from `start` on; query
    tile r stands at key tile first + r, sees `reach` tiles before it, and each of its mean queries
    sees the mean keys up to its own. Mean queries before `present` and from `absent` on hold
    nothing. Column 1 + j of the scores is key tile begin + j; what no mean query sees is not
    written. q (B * h, ..., D) and k (B * h, ..., D) fp32, rows contiguous."""
    head = tl.program_id(0).to(tl.int64)
    row0 = tl.program_id(1) * (TILE // PARTS)
    q += head * q_head
    k += head * k_head
    each = tl.arange(0, TILE)
    row = (start + row0) * PARTS + each
    has_row = (row >= present) & (row < tl.minimum(absent, (start + rows) * PARTS))
    own = first + row // PARTS
    last = first * PARTS + row
    since = tl.maximum(own - reach, 0) * PARTS
    # Blocks of 64 mean keys begin with a tile.
    low = tl.maximum(first + start + row0 - reach, begin) * PARTS
    high = (first + tl.minimum(start + row0 + TILE // PARTS, start + rows)) * PARTS
    top = tl.full([TILE], LOWEST, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    for key0 in tl.range(low, high, TILE):
        key = key0 + each
        products = _products(q, k, row, key, has_row, key < high, scale, D)
        seen = (key[None, :] <= last[:, None]) & (key[None, :] >= since[:, None])
        products = tl.where(seen, products, float("-inf"))
        highest = tl.maximum(top, tl.max(products, 1))
        total = total * tl.exp2(top - highest) + tl.sum(tl.exp2(products - highest[:, None]), 1)
        top = highest
    # A mean query that holds nothing attends to nothing.
    normaliser = tl.where(has_row, top + tl.log2(total), float("inf"))
    tile_row = row0 + tl.arange(0, TILE // PARTS)
    scores += (head * rows + tile_row[:, None]) * (1 + tiles)
    for key0 in tl.range(low, high, TILE):
        key = key0 + each
        products = _products(q, k, row, key, has_row, key < high, scale, D)
        seen = (key[None, :] <= last[:, None]) & (key[None, :] >= since[:, None])
        weights = tl.where(seen, tl.exp2(products - normaliser[:, None]), 0.0)
        grouped = tl.reshape(weights, (TILE // PARTS, PARTS, TILE // PARTS, PARTS))
        masses = tl.sum(tl.sum(grouped, 3), 1)
        tile = key0 // PARTS + tl.arange(0, TILE // PARTS)
        wanted = (tile_row < rows)[:, None] & (tile < high // PARTS)[None, :]
        tl.store(scores + 1 + (tile - begin)[None, :], masses, mask=wanted)
