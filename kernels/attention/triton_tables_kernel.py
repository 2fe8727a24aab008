"""The device code that makes the attention kernel's tables from an index. Importing this imports triton.

Shapes: B batch, H query heads, ND diagonals of a head, NC columns, N key tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = tl.constexpr(64)


@triton.jit
def below(entries, bounds, count, steps):
    """How many of the first `count` ascending entries lie below each bound: a binary search of `steps` halvings."""
    low = tl.zeros_like(bounds)
    high = low + count
    for _ in range(steps):
        middle = (low + high) // 2
        open_ = low < high
        less = tl.load(entries + middle, mask=open_, other=0) < bounds
        low = tl.where(open_ & less, middle + 1, low)
        high = tl.where(open_ & less, high, tl.where(open_, middle, high))
    return low


@triton.jit
def is_listed(entries, wanted, count, steps):
    """Which of `wanted` are among the first `count` of the ascending entries."""
    at = below(entries, wanted, count, steps)
    return tl.load(entries + at, mask=at < count, other=-1) == wanted


@triton.jit
def _append(to, values, chosen, found, counts, at, present):
    """Append the chosen values to a list of `found`, and count for each place how many there are up to it."""
    upto = found + tl.cumsum(chosen.to(tl.int32), 0)
    tl.store(to + upto - 1, values, mask=chosen)
    tl.store(counts + at, upto, mask=present)
    return found + tl.sum(chosen.to(tl.int32))


@triton.jit(
    do_not_specialize=[
        "heads", "width", "columns_width", "walk_width", "n", "reach", "window", "steps", "column_steps",
    ]
)  # fmt: skip
def tables_kernel(
    diagonals, columns, alone, tables, heads, width, columns_width, walk_width, n, reach, window, steps, column_steps,
    ROWS: tl.constexpr, ALONE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The tables of one head; what they are sparse_attention_kernel says.

    diagonals (B, H, ND) and columns (B, H, NC) int32, as in a SparseIndex; alone (H) int32 if ALONE: 1 for each head
    whose programs serve one query tile, not two; reach: the farthest diagonal that is looked at; window: the whole
    tiles that it holds, or more than there are.
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
    # Diagonals 0, 1, 2 ... without a gap hold whatever lies in so many tiles up to the own one.
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
        wholes = _append(walk, e, before & (e <= whole) & first & second, wholes, counts, e, present)
        if ROWS == 2:
            firsts = _append(walk + walk_width, e, before & first & (second == 0), firsts, counts + n + 1, e, present)
            seconds = _append(
                walk + 2 * walk_width, e, before & second & (first == 0), seconds, counts + 2 * (n + 1), e, present
            )
        cut = before & (e > whole) & first & second
        cuts = _append(walk + 3 * walk_width, e, cut, cuts, counts + 3 * (n + 1), e, present)
        free = below(columns, tl.maximum(e + 1 - unbroken, 0) * TILE, columns_width, column_steps)
        tl.store(counts + 4 * (n + 1) + e, free, mask=present)
        lost = below(columns, tl.maximum(e - reach, 0) * TILE, columns_width, column_steps)
        tl.store(counts + 5 * (n + 1) + e, lost, mask=present)
