"""Device code of the launches around attention: an index's tables, and the merge of parts.

Imports triton. Shapes: B batch, H query heads, G KV heads, Q query length, E value dim, N key
tiles, P parts, ND diagonals of a head, NC columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.triton_step import (
    LOG2E,
    LOWEST,
    TILE,
    below,
    is_listed,
    with_sink,
)


@triton.jit(do_not_specialize=["rows", "q_len", "splits"])
def combine_kernel(
    tops, totals, partial, out, lse, sinks, out_batch, out_head, out_row, num_kv_heads, rows,
    q_len, splits,
    E: tl.constexpr, BLOCK_E: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
    HOLES: tl.constexpr,
):  # fmt: skip
    """Puts the parts of one query row together, in their order, SPLITS at a time.

    tops, totals (B, G, P, rows) and partial (B, G, P, rows, E) fp32, rows = H / G * Q; where a
    total is 0 nothing else is read. sinks (H) fp32 if SINKS: a logit of each head that takes part
    in the softmax and has no value. Rows without a part are left as they are if HOLES.
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
        part = tl.load(
            partial + at[:, None] * E + at_e[None, :], mask=present[:, None] & (at_e < E)[None, :],
            other=0.0
        )  # fmt: skip
        acc += tl.sum(weight[:, None] * part, 0)
    # A query that saw no key gets zeros, and the logarithm of 0, -inf.
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


@triton.jit
def _append(to, values, chosen, found, counts, at, present):
    """Append the chosen values to a list of `found`, and count those up to each place."""
    upto = found + tl.cumsum(chosen.to(tl.int32), 0)
    tl.store(to + upto - 1, values, mask=chosen)
    tl.store(counts + at, upto, mask=present)
    return found + tl.sum(chosen.to(tl.int32))


@triton.jit(
    do_not_specialize=[
        "heads", "width", "columns_width", "walk_width", "n", "reach", "window", "steps",
        "column_steps",
    ]
)  # fmt: skip
def tables_kernel(
    diagonals, columns, alone, tables, heads, width, columns_width, walk_width, n, reach, window,
    steps, column_steps,
    ROWS: tl.constexpr, ALONE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The tables of one head, described in sparse_attention_kernel.

    Args:
        diagonals: (B, H, ND) int32, as in a SparseIndex.
        columns: (B, H, NC) int32, as in a SparseIndex.
        alone: (H) int32 if ALONE: 1 for each head whose programs serve one query tile, not two.
        tables: (B, H, 4 * walk_width + 7 * (n + 1)) int32, written to.
        heads: H.
        width: ND.
        columns_width: NC.
        walk_width: entries that each of the four walks has space for.
        n: key tiles.
        reach: the farthest diagonal that any query sees.
        window: the whole tiles that it holds, or more than there are.
        steps: steps of a binary search in the diagonals.
        column_steps: steps of a binary search in the columns.
        ROWS: query tiles that one program serves, 1 or 2.
        ALONE: False if `alone` is a placeholder.
        CHUNK: entries that are read at a time.
    """
    head = tl.program_id(0).to(tl.int64)
    # The farthest tile before a program's first that no window cuts.
    whole = window - ROWS
    single = 0
    if ALONE:
        single = tl.load(alone + head % heads)
        whole += single
    diagonals += head * width
    columns += head * columns_width
    walk = tables + head * (4 * walk_width + 7 * (n + 1))
    counts = walk + 4 * walk_width
    held = counts + 6 * (n + 1)
    lane = tl.arange(0, CHUNK)
    # Diagonals 0, 1, 2 ... without a gap hold every tile from there up to the own one.
    unbroken = 0
    for start in range(0, width, CHUNK):
        i = start + lane
        entry = tl.load(diagonals + i, mask=i < width, other=-1)
        unbroken += tl.sum(((entry == i) & (i <= reach)).to(tl.int32))
    wholes = 0
    firsts = 0
    seconds = 0
    cuts = 0
    for start in range(0, n + 1, CHUNK):
        e = start + lane
        present = e <= n
        first = (e <= reach) & (e < n) & is_listed(diagonals, e, width, steps)
        tl.store(held + e, first.to(tl.int32), mask=present)
        second = first
        if ROWS == 2:
            second = (e < reach) & (e < n - 1) & is_listed(diagonals, e + 1, width, steps)
            if ALONE:
                second = tl.where(single != 0, first, second)
        before = (e > 0) & (e < n)
        wholes = _append(
            walk, e, before & (e <= whole) & first & second, wholes, counts, e, present
        )
        if ROWS == 2:
            firsts = _append(
                walk + walk_width,
                e,
                before & first & (second == 0),
                firsts,
                counts + n + 1,
                e,
                present,
            )
            seconds = _append(
                walk + 2 * walk_width,
                e,
                before & second & (first == 0),
                seconds,
                counts + 2 * (n + 1),
                e,
                present,
            )
        cut = before & (e > whole) & first & second
        cuts = _append(walk + 3 * walk_width, e, cut, cuts, counts + 3 * (n + 1), e, present)
        free = below(columns, tl.maximum(e + 1 - unbroken, 0) * TILE, columns_width, column_steps)
        tl.store(counts + 4 * (n + 1) + e, free, mask=present)
        lost = below(columns, tl.maximum(e - reach, 0) * TILE, columns_width, column_steps)
        tl.store(counts + 5 * (n + 1) + e, lost, mask=present)
