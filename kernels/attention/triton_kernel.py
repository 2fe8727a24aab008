"""The device code of the Triton backend; kernels.attention.triton launches it. Importing this imports triton.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim, R query tiles, N key
tiles, P parts.

A program serves one or two adjacent query tiles of one query head (H.rows). With two a key tile that both want is read
once, which halves the traffic from the L2 cache. Few queries on a long past are too few programs for a GPU: each does a
part of its keys (H.split), and combine_kernel puts the parts together (Flash-Decoding; Dao et al., 2023).

A head dim is two powers of two side by side, d0 + d1 >= d (80 = 64 + 16, 96 = 64 + 32), so that little is padded; the
value dim likewise. What a call does not need (kernels.attention.triton_launch.How) is not compiled in.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.triton_loops import every_step
from kernels.attention.triton_step import LN2, LOG2E, LOWEST, TILE, load_rows, scaled, store_rows, with_sink


@triton.jit
def _sums(top, total, exists, scale, sinks, head, H: tl.constexpr):
    """The log-sum-exp of each query as a power of two, and what its output is multiplied by in the end."""
    total = tl.where(exists, total, 1.0)
    log_sum = scaled(top, scale, H) + tl.log2(total)
    left = 1.0 / total
    if H.sinks:
        log_sum, unsunk = with_sink(log_sum, tl.load(sinks + head))
        left = left * unsunk
    return log_sum, left


@triton.jit
def _program(
    pid,
    q, k, v, out, lse, tables, tiles, offsets, columns, dense_tail, pages, places, sinks, skip, skipped, heads,
    tops, totals, partial, scale, softcap,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    num_heads, num_kv_heads, head_count, chunks, splits, q_len, k_len, first_row, num_rows, window,
    walk_width, table_width, columns_width, pages_width, search_steps,
    H: tl.constexpr,
):  # fmt: skip
    """One program of sparse_attention_kernel; 1 if its output holds NaN, which H.safe then replaces."""
    tl.static_assert(H.rows == 1 or not (H.tiles or H.skip))
    # The query heads of one KV head run side by side and read its keys while the L2 cache has them, then the next part
    # of those; long rows start first, so that the last programs to finish are short ones.
    group = num_heads // num_kv_heads
    blocks = (num_rows + H.rows - 1) // H.rows
    chunk = pid // (blocks * splits * group)
    rest = pid % (blocks * splits * group)
    sequence = (chunk // chunks).to(tl.int64)
    head = (chunk % chunks * group + rest % group).to(tl.int64)
    if H.subset:
        head = tl.load(heads + head).to(tl.int64)
    kv_head = head // group
    part = rest // group % splits

    batch = sequence
    lse_len = q_len
    first_query = tl.full([], 0, tl.int64)
    if H.ragged:
        places += sequence * 5
        batch = tl.load(places).to(tl.int64)
        first_query = tl.load(places + 1).to(tl.int64)
        q += first_query * q_row
        q_len = tl.load(places + 2)
        if H.page == 0:
            k_start = tl.load(places + 3).to(tl.int64)
            k += k_start * k_row
            v += k_start * v_row
        k_len = tl.load(places + 4)
        first_row = (k_len - q_len) // TILE
        blocks = ((k_len + TILE - 1) // TILE - first_row + H.rows - 1) // H.rows
    row = (blocks - 1 - rest // (group * splits)) * H.rows
    at = first_row + row

    # Where the program's part of its query 0 goes; one number, which is held to the end.
    to_part = ((batch * num_kv_heads + kv_head) * splits + part) * group + head % group
    to_part = to_part * lse_len + first_query
    heads_before = sequence * num_heads + head
    walk = tables + heads_before * (4 * walk_width + 7 * table_width)
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

    # How many tiles before its own a query tile can see, and the last key that each query no longer sees.
    reach = at
    local = tl.arange(0, H.rows * TILE)
    half = local // TILE
    position = at * TILE + local
    floor = position
    # The farthest tile that no query's window cuts.
    uncut = at
    if H.window:
        reach = tl.minimum(at, (window + TILE - 2) // TILE)
        floor = position - window
        uncut = tl.minimum(at, window // TILE - H.rows)
    # Whether the first and the last query tile see every key.
    dense = 0
    dense_last = 0
    if H.tail:
        tail = tl.load(dense_tail + head)
        first_dense = tl.where(tail > 0, tl.maximum(k_len - tail, 0) // TILE, k_len + 1)
        dense = (at >= first_dense).to(tl.int32)
        dense_last = (at + H.rows - 1 >= first_dense).to(tl.int32)

    query = position - (k_len - q_len)
    exists = (query >= 0) & (query < q_len)
    q_rows = query.to(tl.int64) * q_row
    q0 = load_rows(q, q_rows, exists, 0, H.d0, H.d, True)
    q1 = q0
    if H.d1 > 0:
        q1 = load_rows(q, q_rows, exists, H.d0, H.d1, H.d, True)
    # Listed tiles before the own one, and how many of them are edges: all, if one of them is on a diagonal, too.
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
    firsts = 0
    seconds = 0
    edges = 0
    if H.walk:
        inner = tl.load(counts + at)
        if H.rows == 2:
            firsts = tl.load(counts + table_width + at)
            seconds = tl.load(counts + 2 * table_width + at)
        edges = firsts + seconds
        if H.window:
            edges += tl.load(counts + 3 * table_width + at)
    if H.tail:
        inner = tl.where(dense != 0, tl.maximum(tl.minimum(reach, uncut), 0), tl.where(dense_last != 0, 0, inner))
        edges = tl.where(dense_last != 0, reach - inner, edges)
        firsts = tl.where(dense_last != 0, 0, firsts)
        seconds = tl.where(dense_last != 0, 0, seconds)
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
    place = (held, at, half, floor, position, exists, k_len, dense, dense_last, part, splits)
    named = (walk, walk_width, inner, firsts, seconds, edges, cut, tiles, listed)
    columned = (columns, first_column, column_count, search_steps)
    bound = 0.0
    if H.skip:
        bound = tl.load(skip + heads_before)
    spoilt = 0
    if H.safe:
        # A few keys and a few columns at a time, so as to take no more registers than the fast way does.
        for e_first in range(0, H.e, 16):
            state, _ = every_step((q0, q1, scale, softcap, e_first), kv, place, named, columned, bound, H)
            acc, _, top, total = state
            e = e_first + tl.arange(0, 16)
            there = exists[:, None] & (e < H.e)[None, :]
            if H.split:
                tl.store(partial + (to_part + query)[:, None] * H.e + e[None, :], acc, mask=there)
            else:
                to = out + batch * out_batch + head * out_head + (first_query + query)[:, None] * out_row
                _, left = _sums(top, total, exists, scale, sinks, head, H)
                tl.store(to + e[None, :], (acc * left[:, None]).to(out.dtype.element_ty), mask=there)
    else:
        state, left_out = every_step((q0, q1, scale, softcap, 0), kv, place, named, columned, bound, H)
        acc0, acc1, top, total = state
        if H.skip:
            tl.atomic_add(skipped + heads_before, left_out)
        if H.ragged and not H.split:
            # Read again: what a load has given takes registers for as long as it is kept.
            batch = tl.load(places, volatile=True).to(tl.int64)
            first_query = tl.load(places + 1, volatile=True).to(tl.int64)
            q_len = tl.load(places + 2, volatile=True)
            query = position - (tl.load(places + 4, volatile=True) - q_len)
            exists = (query >= 0) & (query < q_len)
        if H.split:
            to = to_part + query
            tl.store(tops + to, scaled(top, scale, H), mask=exists)
            tl.store(totals + to, total, mask=exists)
            out = partial
            out_rows = to * H.e
        else:
            log_sum, left = _sums(top, total, exists, scale, sinks, head, H)
            acc0 = acc0 * left[:, None]
            if H.e1 > 0:
                acc1 = acc1 * left[:, None]
            tl.store(lse + (batch * num_heads + head) * lse_len + first_query + query, log_sum * LN2, mask=exists)
            out += batch * out_batch + head * out_head
            out_rows = (first_query + query) * out_row
        store_rows(out, out_rows, exists, acc0, 0, H.e0, H.e)
        if H.e1 > 0:
            store_rows(out, out_rows, exists, acc1, H.e0, H.e1, H.e)
        spoilt = tl.max(tl.max((acc0 != acc0).to(tl.int32), 1), 0)
        if H.e1 > 0:
            spoilt = tl.maximum(spoilt, tl.max(tl.max((acc1 != acc1).to(tl.int32), 1), 0))
    return spoilt


@triton.jit(
    do_not_specialize=[
        "num_heads", "num_kv_heads", "head_count", "chunks", "splits", "q_len", "k_len", "first_row", "num_rows",
        "window", "walk_width", "table_width", "columns_width", "pages_width", "search_steps",
    ]
)  # fmt: skip
def sparse_attention_kernel(
    q, k, v, out, lse, tables, tiles, offsets, columns, dense_tail, pages, places, sinks, skip, skipped, heads,
    tops, totals, partial, scale, softcap,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    num_heads, num_kv_heads, head_count, chunks, splits, q_len, k_len, first_row, num_rows, window,
    walk_width, table_width, columns_width, pages_width, search_steps,
    H: tl.constexpr,
):  # fmt: skip
    """Sparse attention of one program: H.rows query tiles of a head (MInference 1.0, Algorithm 5, for every pattern).

    e is a distance in key tiles from a program's first query tile.
    tables (B, H, 4 * walk_width + 7 * table_width) int32, table_width = N + 1, by the tables kernel; of each head:
    walk (4, walk_width): distances in key tiles from a program's first query tile, ascending, of tiles that both of
    its query tiles want, only the first, only the second, or whoever does but the window cuts.
    counts (6, table_width), by the first query tile: how many entries of each of these it has; by the last: columns
    before the unbroken run of diagonals; by the first: columns before all tiles that it sees.
    held (table_width): whether the head has that diagonal.
    tiles (T) int32 and offsets (B, H, R + 1) int64 if H.tiles, as in a SparseIndex.
    dense_tail (H) int32 if H.tail: how many of the last queries see every key.
    pages (B, pages_width) int32 if H.page > 0; k_batch and v_batch are then the strides of a page.
    places (B, 5) int32 if H.ragged: batch row, first query, queries, first key and keys of each sequence; B is then the
    number of sequences, and num_rows, q_len of q and the widths of all tables are those of the longest.
    sinks (H) fp32 if H.sinks: a logit of each head that takes a share and has no value.
    heads (head_count) int32 if H.subset: the heads that the launch serves, ascending, `chunks` times H / G of them.
    skip (B, H) fp32 if H.skip: the log of each head's threshold; skipped (B, H) int32: to which is added how many tiles
    it skips.
    tops, totals (B, G, P, H / G * Q) and partial (..., E) fp32 if H.split, instead of out and lse: of each of the
    P = splits parts maximum (as a power of two), sum and unnormalised output.
    """
    pid = tl.program_id(0)
    group = num_heads // num_kv_heads
    rows = (num_rows + H.rows - 1) // H.rows * splits * group
    if H.subset:  # noqa: SIM102 (known at compile time; the next is not)
        if pid // rows % chunks * group + pid % rows % group >= head_count:
            return
    if H.ragged:
        mine = places + (pid // rows // chunks).to(tl.int64) * 5
        seen = tl.load(mine + 4)
        have = (seen + TILE - 1) // TILE - (seen - tl.load(mine + 2)) // TILE
        if pid % rows // (group * splits) >= (have + H.rows - 1) // H.rows:
            return
    spoilt = _program(
        pid, q, k, v, out, lse, tables, tiles, offsets, columns, dense_tail, pages, places, sinks, skip, skipped, heads,
        tops, totals, partial, scale, softcap,
        q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
        num_heads, num_kv_heads, head_count, chunks, splits, q_len, k_len, first_row, num_rows, window,
        walk_width, table_width, columns_width, pages_width, search_steps, H,
    )  # fmt: skip
    # A zero weight times a value that is NaN or infinite is NaN. Such values are rare, so nobody looks for them until
    # they show; then everything is done again with care.
    if spoilt != 0:
        # In truth the same number: whatever follows from it is worked out anew, and held in no register until then.
        pid += spoilt - 1
        _program(
            pid, q, k, v, out, lse, tables, tiles, offsets, columns, dense_tail, pages, places, sinks, skip, skipped,
            heads, tops, totals, partial, scale, softcap,
            q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
            num_heads, num_kv_heads, head_count, chunks, splits, q_len, k_len, first_row, num_rows, window,
            walk_width, table_width, columns_width, pages_width, search_steps, H.careful,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "q_len", "splits"])
def combine_kernel(
    tops, totals, partial, out, lse, sinks, out_batch, out_head, out_row, num_kv_heads, rows, q_len, splits,
    E: tl.constexpr, BLOCK_E: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    """Puts the parts of one query row together, in their order, SPLITS at a time.

    tops, totals (B, G, P, rows) and partial (B, G, P, rows, E) fp32, rows = H / G * Q; where a total is 0 nothing else
    is read. sinks (H) fp32 if SINKS: a logit of each head that takes a share and has no value. Rows without a part are
    left as they are if HOLES.
    """
    pid = tl.program_id(0).to(tl.int64)
    kv = pid // rows
    row = pid % rows
    at_e = tl.arange(0, BLOCK_E)
    first = kv * splits * rows + row
    lane = tl.arange(0, SPLITS)
    highest = LOWEST
    for start in range(0, splits, SPLITS):
        at = first + (start + lane) * rows
        present = start + lane < splits
        present = present & (tl.load(totals + at, mask=present, other=0.0) != 0.0)
        highest = tl.maximum(highest, tl.max(tl.load(tops + at, mask=present, other=LOWEST)))
    total = 0.0
    acc = tl.zeros([BLOCK_E], tl.float32)
    for start in range(0, splits, SPLITS):
        at = first + (start + lane) * rows
        present = start + lane < splits
        some = tl.load(totals + at, mask=present, other=0.0)
        present = present & (some != 0.0)
        weight = tl.exp2(tl.load(tops + at, mask=present, other=LOWEST) - highest)
        total += tl.sum(weight * some)
        each = tl.load(
            partial + at[:, None] * E + at_e[None, :], mask=present[:, None] & (at_e < E)[None, :], other=0.0
        )  # fmt: skip
        acc += tl.sum(weight[:, None] * each, 0)
    # A query that saw no key: zeros and -inf, which the logarithm gives.
    acc = acc / tl.where(total == 0.0, 1.0, total)
    head = kv % num_kv_heads * (rows // q_len) + row // q_len
    log_sum = highest + tl.log2(total)
    if SINKS:
        log_sum, share = with_sink(log_sum, tl.load(sinks + head))
        acc = acc * share
    if HOLES:  # noqa: SIM102 (known at compile time; the next is not)
        if total == 0.0:
            return
    out += kv // num_kv_heads * out_batch + head * out_head + row % q_len * out_row
    tl.store(out + at_e, acc.to(out.dtype.element_ty), mask=at_e < E)
    tl.store(lse + kv * rows + row, log_sum / LOG2E)
