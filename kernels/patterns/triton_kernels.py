"""Device code of the builders; kernels.patterns.triton launches it. Imports triton.

Shapes: B batch, h heads asked for, H query heads, G KV heads, Q query length, K key length, D head
dim, N key tiles, C chunks of tiles, at most 64; M queries of a program.

The last queries of MEMBERS heads that share a KV head form one product, MEMBERS * 64 rows, so
that its keys are read once for all of them. Query blocks and key tiles are counted from the end:
block or tile 0 ends with the last position, and the distance between block b and tile t is 64 * (t
- b) + row - column, whatever the lengths.

Pages are as in triton_means_kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.triton_step import LN2, LOG2E, LOWEST, TILE, load_rows
from kernels.patterns.triton_means_kernels import element_of, rows_of


@triton.jit
def _members(group, q_len, block, members, MEMBERS: tl.constexpr):
    """Head, place among the heads, query, and mask of existing queries of a program's rows."""
    local = tl.arange(0, MEMBERS * TILE)
    entry = members + (group * MEMBERS + local // TILE) * 3
    before_end = (block + 1) * TILE - local % TILE
    return tl.load(entry), tl.load(entry + 1), q_len - before_end, before_end <= tl.load(entry + 2)


@triton.jit
def _logits(
    q0, q1, k, pages, tile, block, k_len, k_page, k_row, scale, window,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, MEMBERS: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Logits (M, 64) of a query block on a key tile, powers of two, -inf if unseen; and keys."""
    start = k_len - (tile + 1) * TILE
    column = tl.arange(0, TILE)
    present = start + column >= 0
    k, rows = rows_of(k, pages, start, start + TILE - 1, present, k_page, k_row, PAGE)
    logits = tl.dot(q0, tl.trans(load_rows(k, rows, present, 0, D0, D, True).to(q0.dtype)))
    if D1 > 0:
        logits = tl.dot(
            q1, tl.trans(load_rows(k, rows, present, D0, D1, D, True).to(q0.dtype)), logits
        )
    row = tl.arange(0, MEMBERS * TILE) % TILE
    distance = (tile - block) * TILE + row[:, None] - column[None, :]
    seen = (distance >= 0) & present[None, :]
    if WINDOW:
        seen = seen & (distance < window)
    return tl.where(seen, logits * scale, float("-inf")), start + column


_SIZES = [
    "heads",
    "groups",
    "group_size",
    "q_len",
    "k_len",
    "tiles",
    "chunk",
    "chunks",
    "rows",
    "window",
]


@triton.jit(do_not_specialize=_SIZES)
def normalisers_kernel(
    q, k, pages, normalisers, members,
    scale,
    q_batch, q_head, q_row, k_batch, k_head, k_row, pages_width,
    heads, groups, group_size, q_len, k_len, tiles, chunk, chunks, rows, window,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    MEMBERS: tl.constexpr, WINDOW: tl.constexpr, STAGES: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of a query block over a chunk of key tiles: (B, h, rows, C) fp32, natural.

    members (groups, MEMBERS, 3): head, place among the heads asked for, and number of last queries;
    the heads of a group share a KV head, and a place without one repeats a head with 0 queries.
    """
    group = tl.program_id(0) % groups
    part = tl.program_id(0) // groups % chunks
    batch = (tl.program_id(0) // groups // chunks).to(tl.int64)
    block = tl.program_id(1)
    head, place, query, asked = _members(group, q_len, block, members, MEMBERS)
    if tl.max(asked.to(tl.int32)) == 0:
        return
    k, pages = element_of(k, pages, batch, k_batch, pages_width, PAGE)
    k += tl.load(members + group * MEMBERS * 3) // group_size * k_head
    q += batch * q_batch
    q_rows = head * q_head + query.to(tl.int64) * q_row
    q0 = load_rows(q, q_rows, asked, 0, D0, D, True)
    q1 = q0
    if D1 > 0:
        q1 = load_rows(q, q_rows, asked, D0, D1, D, True)
    top = tl.full([MEMBERS * TILE], LOWEST, tl.float32)
    total = tl.zeros([MEMBERS * TILE], tl.float32)
    # The page of a key is looked up before it: copying ahead takes twice as many stages.
    LEVELS: tl.constexpr = 2 if PAGE > 0 else 1
    for tile in tl.range(
        part * chunk, tl.minimum((part + 1) * chunk, tiles), num_stages=1 + (STAGES - 1) * LEVELS
    ):
        logits, _ = _logits(
            q0,
            q1,
            k,
            pages,
            tile,
            block,
            k_len,
            k_batch,
            k_row,
            scale,
            window,
            D,
            D0,
            D1,
            MEMBERS,
            WINDOW,
            PAGE,
        )
        highest = tl.maximum(top, tl.max(logits, 1))
        total = total * tl.exp2(top - highest) + tl.sum(tl.exp2(logits - highest[:, None]), 1)
        top = highest
    at = (
        (batch * heads + place) * rows + block * TILE + tl.arange(0, MEMBERS * TILE) % TILE
    ) * chunks + part
    tl.store(normalisers + at, (top + tl.log2(total)) * LN2, mask=asked)


@triton.jit
def _keep(out, at, values, live, block, ADD: tl.constexpr):
    """Stores the values of block 0, and adds those of the blocks after it."""
    if ADD:
        values += tl.load(out + at, mask=live & (block > 0), other=0.0)
    tl.store(out + at, values, mask=live)


@triton.jit
def _over_queries(weights, MEMBERS: tl.constexpr):
    """Sums of (M, 64) over the queries of each member: (MEMBERS, 64)."""
    return tl.sum(tl.reshape(weights, (MEMBERS, TILE, TILE)), 1)


@triton.jit
def _masses(
    block, begin, end, group, batch, q, k, pages, normalisers, members, vertical, near, far,
    scale, q_head, q_row, k_batch, k_row,
    heads, q_len, k_len, tiles, chunks, rows, window,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    MEMBERS: tl.constexpr, WINDOW: tl.constexpr, STAGES: tl.constexpr, PAGE: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """Attention of a query block to keys and to distances of tiles begin ... end - 1."""
    head, place, query, asked = _members(group, q_len, block, members, MEMBERS)
    if tl.max(asked.to(tl.int32)) == 0:
        return
    q_rows = head * q_head + query.to(tl.int64) * q_row
    q0 = load_rows(q, q_rows, asked, 0, D0, D, True)
    q1 = q0
    if D1 > 0:
        q1 = load_rows(q, q_rows, asked, D0, D1, D, True)
    row = tl.arange(0, MEMBERS * TILE) % TILE
    at = (batch * heads + place) * rows + block * TILE + row
    lane = tl.arange(0, 64)
    present = asked[:, None] & (lane < chunks)[None, :]
    sums = (
        tl.load(
            normalisers + at[:, None] * chunks + lane[None, :], mask=present, other=float("-inf")
        )
        * LOG2E
    )
    top = tl.maximum(tl.max(sums, 1), LOWEST)
    # Queries that are not asked have a sum of infinity: they attend to nothing.
    normaliser = tl.where(
        asked, top + tl.log2(tl.sum(tl.exp2(sums - top[:, None]), 1)), float("inf")
    )

    column = tl.arange(0, TILE)
    entry = members + (group * MEMBERS + tl.arange(0, MEMBERS)) * 3
    live = (tl.load(entry + 2) > block * TILE)[:, None] & (column >= 0)[None, :]
    member = (batch * heads + tl.load(entry + 1))[:, None]
    # Column c of the skewed weights holds what lies c, or c - 64, keys before the row's own place
    # in the tile.
    skew = (row[:, None] - column[None, :]) & (TILE - 1)
    LEVELS: tl.constexpr = 2 if PAGE > 0 else 1
    last = tl.minimum(end + block, tiles)
    for tile in tl.range(tl.maximum(begin, block), last, num_stages=1 + (STAGES - 1) * LEVELS):
        logits, key = _logits(
            q0,
            q1,
            k,
            pages,
            tile,
            block,
            k_len,
            k_batch,
            k_row,
            scale,
            window,
            D,
            D0,
            D1,
            MEMBERS,
            WINDOW,
            PAGE,
        )
        weights = tl.exp2(logits - normaliser[:, None])
        there = live & (key >= 0)[None, :]
        mine = live
        if ADD:
            there = there & (column + tile * TILE < end * TILE)[None, :]
            mine = live & (column + (tile - block) * TILE >= begin * TILE)[None, :]
        _keep(
            vertical,
            member * k_len + key[None, :],
            _over_queries(weights, MEMBERS),
            there,
            block,
            ADD,
        )
        skewed = tl.gather(weights, skew, 1)
        own = column[None, :] <= row[:, None]
        offset = (tile - block) * TILE
        # There are no distances before those of block 0: it would add zeros, which go to the
        # end.
        before = tl.where(offset == 0, tiles * TILE, offset) - TILE
        width = member * tiles * TILE + column[None, :]
        _keep(
            near,
            width + offset,
            _over_queries(tl.where(own, skewed, 0.0), MEMBERS),
            mine,
            block,
            ADD,
        )
        _keep(
            far,
            width + before,
            _over_queries(tl.where(own, 0.0, skewed), MEMBERS),
            mine,
            block,
            ADD,
        )


@triton.jit(do_not_specialize=_SIZES)
def masses_kernel(
    q, k, pages, normalisers, members, vertical, near, far,
    scale,
    q_batch, q_head, q_row, k_batch, k_head, k_row, pages_width,
    heads, groups, group_size, q_len, k_len, tiles, chunk, chunks, rows, window,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    MEMBERS: tl.constexpr, WINDOW: tl.constexpr, STAGES: tl.constexpr, PAGE: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Attention of query blocks by key and distance (MInference 1.0, Algorithm 2, lines 3-6).

    A tile touches 127 distances: the 64 of its diagonal and, where the column is right of the row,
    those before them. Each has its array, so that one program alone writes a place: a program has
    the keys and the distances of its chunk of tiles. For block b these are not the same tiles: b of
    them are another program's, too (BLOCKS: there are several).

    normalisers (B, h, rows, C) fp32: natural log-sum-exp of each query's logits, by chunks of keys.
    vertical (B, h, K) fp32. near, far (B, h, tiles * 64) fp32: the mass at a distance is the sum of
    both.
    """
    group = tl.program_id(0) % groups
    part = tl.program_id(0) // groups % chunks
    batch = (tl.program_id(0) // groups // chunks).to(tl.int64)
    k, pages = element_of(k, pages, batch, k_batch, pages_width, PAGE)
    k += tl.load(members + group * MEMBERS * 3) // group_size * k_head
    q += batch * q_batch
    begin = part * chunk
    end = tl.minimum(begin + chunk, tiles)
    if BLOCKS:
        for block in tl.range(0, rows // TILE, num_stages=1):
            _masses(
                block, begin, end, group, batch, q, k, pages, normalisers, members, vertical, near,
                far,
                scale, q_head, q_row, k_batch, k_row, heads, q_len, k_len, tiles, chunks, rows,
                window,
                D, D0, D1, MEMBERS, WINDOW, STAGES, PAGE, True,
            )  # fmt: skip
            # The next block adds to what other threads of the program have stored.
            tl.debug_barrier()
    else:
        _masses(
            0, begin, end, group, batch, q, k, pages, normalisers, members, vertical, near, far,
            scale, q_head, q_row, k_batch, k_row, heads, q_len, k_len, tiles, chunks, rows, window,
            D, D0, D1, MEMBERS, WINDOW, STAGES, PAGE, False,
        )  # fmt: skip
