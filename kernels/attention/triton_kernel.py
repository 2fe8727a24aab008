"""Device code of the Triton backend; kernels.attention.triton launches it. Imports triton.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim, R
query tiles, N key tiles, P parts, ND diagonals of a head, NC columns.

A program serves one or two adjacent query tiles of one query head (H.rows). With two a key tile
that both want is read once, which halves the traffic from the L2 cache. Few queries on a long past
are too few programs for a GPU: each does a part of its keys (H.split), and combine_kernel puts the
parts together (Flash-Decoding; Dao et al., 2023).

A head dim is two powers of two side by side, d0 + d1 >= d (80 = 64 + 16, 96 = 64 + 32), so that
little is padded; the value dim likewise, the second part at least 64 wide. Code that a
call does not need is not compiled (kernels.attention.triton_launch.KernelConfig).

No program takes the tiles of another after its own. As a device hands programs out, 32 heads of 8K
tokens or more are done within 2% of the time of evenly shared work; persistent ones, longest first,
within 0.4%. Nor do warps specialise: Triton 3.9 compiles no loop so that looks its tiles up, or
that another follows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.triton_loops import every_step
from kernels.attention.triton_step import (
    LN2,
    TILE,
    load_rows,
    scaled,
    store_rows,
    with_sink,
)


@triton.jit
def _sums(top, total, exists, scale, sinks, head, H: tl.constexpr):
    """Log-sum-exp of each query as a power of two, and the last factor of its output."""
    total = tl.where(exists, total, 1.0)
    log_sum = scaled(top, scale, H) + tl.log2(total)
    left = 1.0 / total
    if H.sinks:
        log_sum, unsunk = with_sink(log_sum, tl.load(sinks + head))
        left = left * unsunk
    return log_sum, left


@triton.jit
def _results(
    zero, places, heads, out, partial,
    num_heads, num_kv_heads, group, chunks, per_chunk, splits, all_queries, all_keys, first_row,
    num_rows,
    out_batch, out_head, out_row,
    H: tl.constexpr,
):  # fmt: skip
    """Base and offsets of a program's rows, which of its queries exist, its head, and more.

    Last come the places of its log-sum-exps, or of the maxima and sums of a part.

    Recomputed to free the registers of the loops, from a number unknown to the compiler: `zero`
    points to a 0, the last number of a head's tables.
    """
    pid = tl.program_id(0) + tl.load(zero, volatile=True)
    _, batch, head, part, first_query, q_len, k_len, _, at = _queries(
        pid,
        places,
        heads,
        group,
        chunks,
        per_chunk,
        splits,
        all_queries,
        all_keys,
        first_row,
        num_rows,
        H,
    )
    query = at * TILE + tl.arange(0, H.rows * TILE) - (k_len - q_len)
    exists = (query >= 0) & (query < q_len)
    if H.split:
        before = ((batch * num_kv_heads + head // group) * splits + part) * group + head % group
        lse_at = before * all_queries + first_query + query
        to = partial
        rows = lse_at * H.e
    else:
        lse_at = (batch * num_heads + head) * all_queries + first_query + query
        to = out + batch * out_batch + head * out_head
        rows = (first_query + query) * out_row
    return to, rows, exists, head, lse_at


@triton.jit
def _queries(
    pid, places, heads, group, chunks, per_chunk, splits, q_len, k_len, first_row, num_rows,
    H: tl.constexpr
):  # fmt: skip
    """A program's place: (sequence, batch, head, part, first_query, q_len, k_len, row, at).

    The query heads of one KV head run side by side and read its keys while the L2 cache has them,
    then the next part of those; long rows start first, so that the last programs to finish are
    short ones.
    """
    blocks = (num_rows + H.rows - 1) // H.rows
    chunk = pid // per_chunk
    rest = pid % per_chunk
    sequence = (chunk // chunks).to(tl.int64)
    head = (chunk % chunks * group + rest % group).to(tl.int64)
    if H.subset:
        head = tl.load(heads + head).to(tl.int64)
    batch = sequence
    first_query = tl.full([], 0, tl.int64)
    if H.ragged:
        places += sequence * 5
        batch = tl.load(places).to(tl.int64)
        first_query = tl.load(places + 1).to(tl.int64)
        q_len = tl.load(places + 2)
        k_len = tl.load(places + 4)
        first_row = (k_len - q_len) // TILE
        blocks = ((k_len + TILE - 1) // TILE - first_row + H.rows - 1) // H.rows
    row = (blocks - 1 - rest // (group * splits)) * H.rows
    return (
        sequence,
        batch,
        head,
        rest // group % splits,
        first_query,
        q_len,
        k_len,
        row,
        first_row + row,
    )


@triton.jit(
    do_not_specialize=[
        "num_heads", "num_kv_heads", "group", "head_count", "chunks", "per_chunk", "splits",
        "q_len", "k_len",
        "first_row", "num_rows", "window", "walk_width", "table_width", "table_size",
        "columns_width", "pages_width",
        "search_steps", "dense_tail",
    ]
)  # fmt: skip
def sparse_attention_kernel(
    q, k, v, out, lse, tables, tiles, offsets, columns, dense_tail, pages, places, sinks, skip,
    skipped, heads,
    tops, totals, partial, scale, softcap,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head,
    out_row,
    num_heads, num_kv_heads, group, head_count, chunks, per_chunk, splits, q_len, k_len, first_row,
    num_rows, window,
    walk_width, table_width, table_size, columns_width, pages_width, search_steps,
    H: tl.constexpr,
):  # fmt: skip
    """Sparse attention of H.rows query tiles of a head (MInference 1.0, Algorithm 5).

    e is a distance in key tiles from a program's first query tile. tables (B, H, table_size) int32
    by the tables kernel, table_width = N + 1 and table_size = 4 * walk_width + 7 * table_width; of
    each head: walk (4, walk_width): distances in key tiles from a program's first query tile,
    ascending, of tiles that both of its query tiles want, only the first, only the second, or
    whoever does but the window cuts. counts (6, table_width), by the first query tile: how many
    entries of each of these it has; by the last: columns before the unbroken run of diagonals; by
    the first: columns before all tiles that it sees. held (table_width): whether the head has that
    diagonal. tiles (T) int32 and offsets (B, H, R + 1) int64 if H.tiles, as in a SparseIndex.
    If H.tail the last dense_tail queries of a sequence see every key. pages (B,
    pages_width) int32 if H.page > 0; k_batch and v_batch are then the strides of a page. places (B,
    5) int32 if H.ragged: batch row, first query, queries, first key and keys of each sequence; B is
    then the number of sequences, and num_rows, q_len of q and the widths of all tables are those of
    the longest. sinks (H) fp32 if H.sinks: a logit of each head that takes part in the softmax
    and has no value. heads (head_count) int32 if H.subset: the heads that the launch serves,
    ascending, `chunks` times H / G of them. skip (B, H) fp32 if H.skip: the log of each head's
    threshold; skipped (B, H) int32: to which is added how many tiles it skips. tops, totals (B, G,
    P, H / G * Q) and partial (..., E) fp32 if H.split, instead of out and lse: of each of the P =
    splits parts maximum (as a power of two), sum and unnormalised output.
    """
    tl.static_assert(H.rows == 1 or not (H.tiles or H.skip))
    pid = tl.program_id(0)
    if H.subset:  # noqa: SIM102 (known at compile time; the next is not)
        if pid // per_chunk % chunks * group + pid % per_chunk % group >= head_count:
            return
    if H.ragged:
        mine = places + (pid // per_chunk // chunks).to(tl.int64) * 5
        seen = tl.load(mine + 4)
        have = (seen + TILE - 1) // TILE - (seen - tl.load(mine + 2)) // TILE
        if pid % per_chunk // (group * splits) >= (have + H.rows - 1) // H.rows:
            return
    all_queries = q_len
    all_keys = k_len
    sequence, batch, head, part, first_query, q_len, k_len, row, at = _queries(
        pid,
        places,
        heads,
        group,
        chunks,
        per_chunk,
        splits,
        all_queries,
        all_keys,
        first_row,
        num_rows,
        H,
    )
    kv_head = head // group
    if H.ragged:
        q += first_query * q_row
        if H.page == 0:
            k_start = tl.load(places + sequence * 5 + 3).to(tl.int64)
            k += k_start * k_row
            v += k_start * v_row

    heads_before = sequence * num_heads + head
    walk = tables + heads_before * table_size
    counts = walk + 4 * walk_width
    held = counts + 6 * table_width
    q += batch * q_batch + head * q_head
    k += kv_head * k_head
    v += kv_head * v_head
    if H.page == 0:
        k += batch * k_batch
        v += batch * v_batch
    else:
        pages += sequence * pages_width

    # Tiles before its own that a query tile can see, and the last key that each query no longer
    # sees.
    reach = at
    local = tl.arange(0, H.rows * TILE)
    half = local // TILE
    position = at * TILE + local
    floor = position
    # The first key that any query of the program sees.
    first_key = 0
    # The farthest tile that no query's window cuts.
    uncut = at
    if H.window:
        reach = tl.minimum(at, (window + TILE - 2) // TILE)
        floor = position - window
        first_key = tl.maximum(at * TILE, k_len - q_len) - window + 1
        uncut = tl.minimum(at, window // TILE - H.rows)
    # Whether the first and the last query tile see every key.
    dense = 0
    dense_last = 0
    if H.tail:
        first_dense = tl.maximum(k_len - dense_tail, 0) // TILE
        dense = (at >= first_dense).to(tl.int32)
        dense_last = (at + H.rows - 1 >= first_dense).to(tl.int32)

    query = position - (k_len - q_len)
    exists = (query >= 0) & (query < q_len)
    q_rows = query.to(tl.int64) * q_row
    q0 = load_rows(q, q_rows, exists, 0, H.d0, H.d, True)
    q1 = q0
    if H.d1 > 0:
        q1 = load_rows(q, q_rows, exists, H.d0, H.d1, H.d, True)
    # Listed tiles before the own one, and how many of them are edges: all, if one of them is on a
    # diagonal, too.
    listed = 0
    cut = 0
    if H.tiles:
        offsets += heads_before * (num_rows + 1) + row
        begin = tl.load(offsets)
        tiles += begin
        entries = (tl.load(offsets + 1) - begin).to(tl.int32)
        beyond = 0
        twice = 0
        for start in range(0, entries, 128):
            i = start + tl.arange(0, 128)
            tile = tl.load(tiles + i, mask=i < entries, other=at)
            there = (tile < at) & (tile >= at - reach)
            listed += tl.sum(there.to(tl.int32))
            if H.window:
                beyond += tl.sum((tile < at - reach).to(tl.int32))
                cut += tl.sum((there & (tile < at - uncut)).to(tl.int32))
            if H.walk:
                twice += tl.sum(tl.load(held + at - tile, mask=there, other=0).to(tl.int32))
        tiles += beyond
        cut = tl.where(twice > 0, listed, cut)
        if H.tail:
            listed = tl.where(dense != 0, 0, listed)
            cut = tl.where(dense != 0, 0, cut)

    inner = 0
    if H.walk:
        inner = tl.load(counts + at)
    if H.tail:
        inner = tl.where(
            dense != 0, tl.maximum(tl.minimum(reach, uncut), 0), tl.where(dense_last != 0, 0, inner)
        )
    first_column = 0
    column_count = 0
    if H.columns:
        columns += heads_before * columns_width
        column_count = tl.load(counts + 4 * table_width + at + H.rows - 1)
        if H.window:
            first_column = tl.load(counts + 5 * table_width + at)
        if H.tail:
            column_count = tl.where(dense != 0, 0, column_count)

    kv = (k, v, pages, k_batch, k_row, v_batch, v_row)
    place = (
        held, at, half, floor, position, exists, first_key, k_len, dense, dense_last, part, splits
    )  # fmt: skip
    named = (walk, walk_width, table_width, reach, inner, cut, tiles, listed)
    columned = (columns, first_column, column_count, search_steps)
    bound = 0.0
    if H.skip:
        bound = tl.load(skip + heads_before)
    state, left_out = every_step((q0, q1, scale, softcap), kv, place, named, columned, bound, H)
    acc0, acc1, top, total = state
    if H.skip:
        tl.atomic_add(skipped + heads_before, left_out)
    to, rows, exists, head, lse_at = _results(
        walk + table_size - 1, places, heads, out, partial,
        num_heads, num_kv_heads, group, chunks, per_chunk, splits, all_queries, all_keys,
        first_row, num_rows,
        out_batch, out_head, out_row, H,
    )  # fmt: skip
    if H.split:
        tl.store(tops + lse_at, scaled(top, scale, H), mask=exists)
        tl.store(totals + lse_at, total, mask=exists)
    else:
        log_sum, left = _sums(top, total, exists, scale, sinks, head, H)
        acc0 = acc0 * left[:, None]
        if H.e1 > 0:
            acc1 = acc1 * left[:, None]
        tl.store(lse + lse_at, log_sum * LN2, mask=exists)
    store_rows(to, rows, exists, acc0, 0, H.e0, H.e)
    if H.e1 > 0:
        store_rows(to, rows, exists, acc1, H.e0, H.e1, H.e)
