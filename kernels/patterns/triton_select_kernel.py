"""Device code that writes a layer's index; kernels.patterns.triton launches it. Imports triton.

Shapes: B batch, H query heads, R query tiles, N key tiles, K key length.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.triton_step import LOG2E, TILE
from kernels.patterns.triton_topk_kernel import (
    PLAIN,
    SOFTMAX,
    SUM,
    pad_from,
    places_of,
    search,
    taken,
)


@triton.jit
def _first(to, count, width, CHUNK: tl.constexpr):
    """Writes 0, 1 ... count - 1, padded to `width`."""
    for start in range(0, count, CHUNK):
        at = start + tl.arange(0, CHUNK)
        tl.store(to + at, at, mask=at < count)
    pad_from(to, count, width, CHUNK)


@triton.jit
def _diagonals(
    row, k_len, size, share, to, width, CHUNK: tl.constexpr, SORT: tl.constexpr,
    COVERAGE: tl.constexpr,
):  # fmt: skip
    """Writes the tile offsets that the best distances cross, ascending, padded to `width`.

    One at distance s crosses floor(s / TILE) and ceil(s / TILE), which is the next unless s is a
    multiple of TILE.
    """
    worst, ties, floor = search(row, 0, TILE, k_len, size, share, 0.0, CHUNK, SORT, COVERAGE)
    tiles = tl.arange(0, CHUNK // TILE)
    lane = tl.arange(0, TILE)
    count = 0
    # Whether the last tile of the chunk before reaches into the first of this one.
    carried = 0
    for start in range(0, k_len, CHUNK):
        at = start + tl.arange(0, CHUNK)
        mask, equal = taken(row, at, k_len, TILE, worst, ties, floor, SORT)
        ties -= equal
        each = tl.reshape(mask.to(tl.int32), (CHUNK // TILE, TILE))
        beyond = tl.max(tl.where(lane[None, :] > 0, each, 0), 1)
        before = tl.sum(tl.where(tiles[:, None] == tiles[None, :] + 1, beyond[None, :], 0), 1)
        crossed = tl.maximum(tl.max(each, 1), tl.where(tiles == 0, carried, before))
        carried = tl.max(tl.where(tiles == CHUNK // TILE - 1, beyond, 0))
        offset = start // TILE + tiles
        crossed = tl.where(offset * TILE < k_len, crossed, 0)
        tl.store(to + count + tl.cumsum(crossed, 0) - 1, offset, mask=crossed != 0)
        count += tl.sum(crossed)
    pad_from(to, count, width, CHUNK)


@triton.jit
def _entries(rows, limit, first):
    """Entries of the first `rows` lists of a head: `limit` each, or the first + r tiles before."""
    rising = tl.minimum(tl.maximum(limit - first, 0), rows).to(tl.int64)
    return rising * first + rising * (rising - 1) // 2 + (rows - rising) * limit


@triton.jit
def _begin(batch, list_, lists, listed, rows, first, reach):
    """Where the lists of a head of an element of the batch begin."""
    begin = tl.full([], 0, tl.int64)
    whole = tl.full([], 0, tl.int64)
    for i in range(lists):
        count = _entries(rows, tl.minimum(tl.load(listed + i * 2 + 1), reach), first)
        begin += tl.where(i < list_, count, 0)
        whole += count
    return batch * whole + begin


@triton.jit
def _softmax(scores, begin, end, factor, CHUNK: tl.constexpr):
    """The largest of scores begin ... end, and the sum of exp2((scores - largest) * factor)."""
    top = tl.full([], float("-inf"), tl.float32)
    for start in range(begin, end, CHUNK):
        at = start + tl.arange(0, CHUNK)
        top = tl.maximum(top, tl.max(tl.load(scores + at, mask=at < end, other=float("-inf"))))
    total = tl.full([], 0.0, tl.float32)
    for start in range(begin, end, CHUNK):
        at = start + tl.arange(0, CHUNK)
        score = tl.load(scores + at, mask=at < end, other=float("-inf"))
        total += tl.sum(tl.exp2((score - top) * factor))
    return top, total


@triton.jit(
    do_not_specialize=[
        "lines", "heads", "massed", "lists", "k_len", "n", "seen", "diagonals_width",
        "columns_width", "all_rows", "first", "reach", "row", "rows", "tile", "width",
    ]
)  # fmt: skip
def select_kernel(
    vertical, near, far, scores, table, listed, shares, diagonals, columns, offsets, tiles,
    lines, heads, massed, lists, k_len, n, seen, diagonals_width, columns_width, all_rows, first,
    reach, row, rows, tile, width, scale,
    LISTS: tl.constexpr, COVERAGE: tl.constexpr, FAR: tl.constexpr, CHUNK: tl.constexpr,
    ROW_CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes an index: one program a head's columns, its diagonals, or one row's list of tiles.

    The first `lines` programs, 2 * B * H or none, write columns and diagonals.

    Args:
        vertical: (B, massed, K) fp32: masses of columns.
        near: (B, massed, seen) fp32: masses of distances.
        far: (B, massed, seen) fp32: masses that are added to those of `near` if FAR.
        scores: (B, lists, rows, width) fp32: of tiles `tile` ... for query tiles `row` ...
        table: (H, 3) int32: place among the heads with masses, or -1: the first entries; most
            columns; most distances, or diagonals without masses.
        listed: (lists, 2) int32: head, and most tiles of a row, its own not included.
        shares: (H) fp64 if COVERAGE: the fraction of the mass that a head takes; 0 takes all.
        diagonals: of the index.
        columns: of the index.
        offsets: of the index; written if LISTS.
        tiles: of the index; written if LISTS.
        lines: programs that write columns and diagonals.
        heads: H.
        massed: heads with masses.
        lists: heads with lists of tiles.
        k_len: K.
        n: key tiles.
        seen: distances with masses.
        diagonals_width: ND.
        columns_width: NC.
        all_rows: R.
        first: key tile of row 0.
        reach: how many tiles before its own a row sees.
        row: the first query tile of `scores`.
        rows: query tiles of `scores`.
        tile: the first key tile of `scores`.
        width: key tiles of `scores`.
        scale: factor on the scores before their softmax, if COVERAGE.
        LISTS: True if a head has a list of tiles.
        COVERAGE: True if a head takes a fraction of the mass.
        FAR: True if `far` is read.
        CHUNK: entries of columns and diagonals that are read at a time.
        ROW_CHUNK: scores of a row that are read at a time.
    """
    pid = tl.program_id(0)
    share = tl.full([], 0.0, tl.float64)
    if pid < lines:
        # Those with the most to do come first.
        at = (pid // 2).to(tl.int64)
        head = at % heads
        batch = at // heads
        place = tl.load(table + head * 3)
        if COVERAGE:
            share = tl.load(shares + head)
        line = batch * massed + tl.maximum(place, 0)
        if pid % 2 == 0:
            size = tl.minimum(tl.load(table + head * 3 + 1), k_len)
            to = columns + at * columns_width
            if place < 0:
                _first(to, size, columns_width, CHUNK)
            else:
                x = vertical + line * k_len
                places_of(
                    (x, x, k_len, 0.0, 0.0, 1.0), 0, TILE, k_len, size, share, 0.0, to,
                    columns_width, CHUNK, PLAIN, COVERAGE,
                )  # fmt: skip
        else:
            size = tl.load(table + head * 3 + 2)
            to = diagonals + at * diagonals_width
            if place < 0:
                _first(to, tl.minimum(size, n), diagonals_width, CHUNK)
            else:
                distances = (near + line * seen, far + line * seen, seen, 0.0, 0.0, 1.0)
                _diagonals(
                    distances, k_len, tl.minimum(size, k_len), share, to, diagonals_width, CHUNK,
                    SUM if FAR else PLAIN, COVERAGE,
                )  # fmt: skip
            if LISTS:
                # The lists of a head without any are empty.
                begin = tl.full([], 0, tl.int64)
                limit = 0
                for i in range(lists):
                    if tl.load(listed + i * 2) == head:
                        begin = _begin(batch, i, lists, listed, all_rows, first, reach)
                        limit = tl.minimum(tl.load(listed + i * 2 + 1), reach)
                for start in range(0, all_rows + 1, CHUNK):
                    r = start + tl.arange(0, CHUNK)
                    tl.store(
                        offsets + at * (all_rows + 1) + r, begin + _entries(r, limit, first),
                        mask=r <= all_rows,
                    )  # fmt: skip
    elif LISTS:
        at = (pid - lines).to(tl.int64)
        list_ = (at // rows % lists).to(tl.int32)
        batch = at // rows // lists
        r = row + (at % rows).to(tl.int32)
        limit = tl.minimum(tl.load(listed + list_ * 2 + 1), reach)
        own = first + r
        low = tl.maximum(own - reach, 0)
        size = tl.minimum(limit, own)
        begin = _begin(batch, list_, lists, listed, all_rows, first, reach)
        x = scores + at * width - tile
        mass = 0.0
        factor = 0.0
        top = 0.0
        total = 1.0
        if COVERAGE:
            share = tl.load(shares + tl.load(listed + list_ * 2))
            if share > 0:
                factor = scale * LOG2E
                top, total = _softmax(x, low, own + 1, factor, ROW_CHUNK)
                mass = tl.exp2((tl.load(x + own) - top) * factor) / total
        # The first tile comes before all others.
        places_of(
            (x, x, n, factor, top, total), low, tl.where(low == 0, 1, low), own, size, share, mass,
            tiles + begin + _entries(r, limit, first), size, ROW_CHUNK, SOFTMAX, COVERAGE,
        )  # fmt: skip
