"""The device code of the builders on GPUs; kernels.patterns.triton launches it. Importing this imports triton.

Shapes: B batch, h heads asked for, H query heads, G KV heads, Q query length, K key length, D head dim, N key tiles,
C chunks of tiles, at most 64; M queries of a program.

The last queries of MEMBERS heads that share a KV head stand in one product, MEMBERS * 64 rows, so that its keys are
read once for all of them. Query blocks and key tiles are counted from the end: block or tile 0 ends with the last
position, and the distance between block b and tile t is 64 * (t - b) + row - column, whatever the lengths.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.triton_step import LN2, LOG2E, LOWEST, TILE, load_rows


@triton.jit
def _members(group, q_len, block, members, MEMBERS: tl.constexpr):
    """Of each row of a program: its head, its place among the heads asked for, its query, and whether it is asked."""
    local = tl.arange(0, MEMBERS * TILE)
    entry = members + (group * MEMBERS + local // TILE) * 3
    before_end = (block + 1) * TILE - local % TILE
    return tl.load(entry), tl.load(entry + 1), q_len - before_end, before_end <= tl.load(entry + 2)


@triton.jit
def _logits(
    q0, q1, k, tile, block, k_len, k_row, scale, window,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, MEMBERS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Logits (M, 64) of a query block on a key tile in powers of two, -inf for what is not seen; and the keys."""
    start = k_len - (tile + 1) * TILE
    column = tl.arange(0, TILE)
    present = start + column >= 0
    k += start.to(tl.int64) * k_row
    logits = tl.dot(q0, tl.trans(load_rows(k, column * k_row, present, 0, D0, D, True)))
    if D1 > 0:
        logits = tl.dot(q1, tl.trans(load_rows(k, column * k_row, present, D0, D1, D, True)), logits)
    row = tl.arange(0, MEMBERS * TILE) % TILE
    distance = (tile - block) * TILE + row[:, None] - column[None, :]
    seen = (distance >= 0) & present[None, :]
    if WINDOW:
        seen = seen & (distance < window)
    return tl.where(seen, logits * scale, float("-inf")), start + column


_SIZES = ["heads", "groups", "group_size", "q_len", "k_len", "tiles", "chunk", "chunks", "rows", "window", "block"]


@triton.jit(do_not_specialize=_SIZES[:-1])
def normalisers_kernel(
    q, k, normalisers, members,
    scale,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    heads, groups, group_size, q_len, k_len, tiles, chunk, chunks, rows, window,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    MEMBERS: tl.constexpr, WINDOW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of a query block's logits over a chunk of key tiles: normalisers (B, h, rows, C) fp32, natural.

    members (groups, MEMBERS, 3): head, place among the heads asked for, and number of last queries; the heads of a
    group share a KV head, and a place without one repeats a head with 0 queries.
    """
    group = tl.program_id(0) % groups
    part = tl.program_id(0) // groups % chunks
    batch = (tl.program_id(0) // groups // chunks).to(tl.int64)
    block = tl.program_id(1)
    head, place, query, asked = _members(group, q_len, block, members, MEMBERS)
    if tl.max(asked.to(tl.int32)) == 0:
        return
    k += batch * k_batch + tl.load(members + group * MEMBERS * 3) // group_size * k_head
    q += batch * q_batch
    q_rows = head * q_head + query.to(tl.int64) * q_row
    q0 = load_rows(q, q_rows, asked, 0, D0, D, True)
    q1 = q0
    if D1 > 0:
        q1 = load_rows(q, q_rows, asked, D0, D1, D, True)
    top = tl.full([MEMBERS * TILE], LOWEST, tl.float32)
    total = tl.zeros([MEMBERS * TILE], tl.float32)
    for tile in tl.range(part * chunk, tl.minimum((part + 1) * chunk, tiles), num_stages=STAGES):
        logits, _ = _logits(q0, q1, k, tile, block, k_len, k_row, scale, window, D, D0, D1, MEMBERS, WINDOW)
        highest = tl.maximum(top, tl.max(logits, 1))
        total = total * tl.exp2(top - highest) + tl.sum(tl.exp2(logits - highest[:, None]), 1)
        top = highest
    at = ((batch * heads + place) * rows + block * TILE + tl.arange(0, MEMBERS * TILE) % TILE) * chunks + part
    tl.store(normalisers + at, (top + tl.log2(total)) * LN2, mask=asked)


@triton.jit
def _keep(out, at, values, live, ADD: tl.constexpr):
    """Stores values, or adds them to what an earlier launch has stored: no two programs of a launch meet."""
    if ADD:
        values += tl.load(out + at, mask=live, other=0.0)
    tl.store(out + at, values, mask=live)


@triton.jit
def _over_queries(weights, MEMBERS: tl.constexpr):
    """Sums of (M, 64) over the queries of each member: (MEMBERS, 64)."""
    return tl.sum(tl.reshape(weights, (MEMBERS, TILE, TILE)), 1)


@triton.jit(do_not_specialize=_SIZES)
def masses_kernel(
    q, k, normalisers, members, vertical, near, far,
    scale,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    heads, groups, group_size, q_len, k_len, tiles, chunk, chunks, rows, window, block,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    MEMBERS: tl.constexpr, WINDOW: tl.constexpr, ADD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What one query block attends to, by key and by distance (MInference 1.0, Algorithm 2, lines 3-6).

    A tile touches 127 distances: those of its own 64 and, where the column is right of the row, those before them. Each
    has its array, so that one program alone writes a place.

    normalisers (B, h, rows, C) fp32: natural log-sum-exp of each query's logits, by chunks of keys.
    vertical (B, h, K) fp32. near, far (B, h, tiles * 64) fp32: the mass at a distance is the sum of both.
    """
    group = tl.program_id(0) % groups
    part = tl.program_id(0) // groups % chunks
    batch = (tl.program_id(0) // groups // chunks).to(tl.int64)
    head, place, query, asked = _members(group, q_len, block, members, MEMBERS)
    if tl.max(asked.to(tl.int32)) == 0:
        return
    k += batch * k_batch + tl.load(members + group * MEMBERS * 3) // group_size * k_head
    q += batch * q_batch
    q_rows = head * q_head + query.to(tl.int64) * q_row
    q0 = load_rows(q, q_rows, asked, 0, D0, D, True)
    q1 = q0
    if D1 > 0:
        q1 = load_rows(q, q_rows, asked, D0, D1, D, True)
    row = tl.arange(0, MEMBERS * TILE) % TILE
    at = (batch * heads + place) * rows + block * TILE + row
    each = tl.arange(0, 64)
    kept = asked[:, None] & (each < chunks)[None, :]
    sums = tl.load(normalisers + at[:, None] * chunks + each[None, :], mask=kept, other=float("-inf")) * LOG2E
    top = tl.maximum(tl.max(sums, 1), LOWEST)
    # Queries that are not asked have a sum of infinity: they attend to nothing.
    normaliser = tl.where(asked, top + tl.log2(tl.sum(tl.exp2(sums - top[:, None]), 1)), float("inf"))

    column = tl.arange(0, TILE)
    entry = members + (group * MEMBERS + tl.arange(0, MEMBERS)) * 3
    live = (tl.load(entry + 2) > block * TILE)[:, None] & (column >= 0)[None, :]
    member = (batch * heads + tl.load(entry + 1))[:, None]
    # Column c of the skewed weights holds what lies c, or c - 64, keys before the row's own place in the tile.
    skew = (row[:, None] - column[None, :]) & (TILE - 1)
    first = tl.maximum(part * chunk, block)
    for tile in tl.range(first, tl.minimum((part + 1) * chunk, tiles), num_stages=STAGES):
        logits, key = _logits(q0, q1, k, tile, block, k_len, k_row, scale, window, D, D0, D1, MEMBERS, WINDOW)
        weights = tl.exp2(logits - normaliser[:, None])
        there = live & (key >= 0)[None, :]
        _keep(vertical, member * k_len + key[None, :], _over_queries(weights, MEMBERS), there, ADD)
        skewed = tl.gather(weights, skew, 1)
        own = column[None, :] <= row[:, None]
        offset = (tile - block) * TILE
        # Before the distances of block 0 lies nothing: what it would add there is 0, and goes to the end.
        before = tl.where(offset == 0, tiles * TILE, offset) - TILE
        width = member * tiles * TILE + column[None, :]
        _keep(near, width + offset, _over_queries(tl.where(own, skewed, 0.0), MEMBERS), live, ADD)
        _keep(far, width + before, _over_queries(tl.where(own, 0.0, skewed), MEMBERS), live, ADD)
