"""The device code that chooses the best of many scores; kernels.patterns.triton launches it. Importing imports triton.

Shapes: B batch, H query heads, h heads of one kind, R query tiles, N key tiles, K key length.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.triton_step import TILE

PAD = tl.constexpr(2**31 - 1)


@triton.jit
def _scores(scores, more, at, n, MORE: tl.constexpr):
    """Scores of some places, with those of `more` added if MORE; -inf for NaN and from n on."""
    found = tl.load(scores + at, mask=at < n, other=float("-inf"))
    if MORE:
        found += tl.load(more + at, mask=at < n, other=0.0)
    return tl.where(found == found, found, float("-inf"))


@triton.jit
def _ordered(scores):
    """Whole numbers without a sign that compare as the scores do: the bits of negative ones run backwards."""
    bits = scores.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _worst(scores, more, first, n, wanted, CHUNK: tl.constexpr, MORE: tl.constexpr):
    """The worst score of the best `wanted` of first ... n, as _ordered, and how many equal to it are among them.

    Eight bits at a time, from the highest: how many scores have each value of them says which one it is.
    """
    bins = tl.arange(0, 256)
    worst = tl.full([], 0, tl.uint32)
    for level in tl.static_range(4):
        counts = tl.zeros([256], tl.int32)
        for start in range(first, n, CHUNK):
            found = _scores(scores, more, start + tl.arange(0, CHUNK), n, MORE)
            order = _ordered(found)
            alike = found > float("-inf")
            if level > 0:
                alike = alike & ((order >> (32 - 8 * level)) == (worst >> (32 - 8 * level)))
            counts += tl.histogram(((order >> (24 - 8 * level)) & 255).to(tl.int32), 256, mask=alike)
        if level == 0:
            wanted = tl.minimum(wanted, tl.sum(counts))
        digit = tl.sum((tl.cumsum(counts, 0, reverse=True) >= wanted).to(tl.int32)) - 1
        wanted -= tl.sum(tl.where(bins > digit, counts, 0))
        worst = worst | (digit.to(tl.uint32) << (24 - 8 * level))
    return worst, wanted


@triton.jit
def _taken(scores, more, at, n, forced, worst, room, MORE: tl.constexpr):
    """Which of some places are taken, and how many of those that are as bad as the worst."""
    found = _scores(scores, more, at, n, MORE)
    order = _ordered(found)
    there = found > float("-inf")
    equal = (there & (at >= forced) & (order == worst)).to(tl.int32)
    best = (order > worst) | ((equal != 0) & (tl.cumsum(equal, 0) <= room))
    return there & ((at < forced) | best), tl.sum(equal)


@triton.jit
def _search(scores, more, first, forced, n, size, CHUNK: tl.constexpr, MORE: tl.constexpr):
    """The worst score and the room for equal ones beside the places first ... forced, which come before all others."""
    held = 0
    for start in range(first, tl.minimum(forced, n), CHUNK):
        found = _scores(scores, more, start + tl.arange(0, CHUNK), tl.minimum(forced, n), MORE)
        held += tl.sum((found > float("-inf")).to(tl.int32))
    return _worst(scores, more, tl.maximum(first, forced), n, tl.maximum(size - held, 0), CHUNK, MORE)


@triton.jit
def _places(scores, first, forced, n, size, places, width, CHUNK: tl.constexpr):
    """The places of the `size` best of first ... n, ascending, padded to `width`."""
    worst, room = _search(scores, scores, first, forced, n, size, CHUNK, False)
    found = 0
    for start in range(first, n, CHUNK):
        at = start + tl.arange(0, CHUNK)
        taken, equal = _taken(scores, scores, at, n, forced, worst, room, False)
        place = found + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(places + place, at, mask=taken & (place < size))
        room -= equal
        found = tl.minimum(found + tl.sum(taken.to(tl.int32)), size)
    for start in range(0, width, CHUNK):
        at = start + tl.arange(0, CHUNK)
        tl.store(places + at, tl.zeros_like(at) + PAD, mask=(at >= found) & (at < width))


@triton.jit
def _offsets(scores, more, n, size, offsets, width, CHUNK: tl.constexpr):
    """The tile offsets that the `size` best of n distances cross, ascending, padded to `width`.

    One at distance s crosses floor(s / TILE) and ceil(s / TILE): the latter is the next but for s = 0, TILE, 2 * TILE.
    """
    worst, room = _search(scores, more, 0, TILE, n, size, CHUNK, True)
    tiles = tl.arange(0, CHUNK // 64)
    lane = tl.arange(0, 64)
    found = 0
    # Whether the tile before the chunk reaches into its first.
    carried = 0
    for start in range(0, n + TILE, CHUNK):
        taken, equal = _taken(scores, more, start + tl.arange(0, CHUNK), n, TILE, worst, room, True)
        room -= equal
        each = tl.reshape(taken.to(tl.int32), (CHUNK // 64, 64))
        own = tl.max(each, 1)
        next_one = tl.max(tl.where(lane[None, :] > 0, each, 0), 1)
        before = tl.sum(tl.where(tiles[:, None] == tiles[None, :] + 1, next_one[None, :], 0), 1)
        crossed = tl.maximum(own, tl.where(tiles == 0, carried, before))
        carried = tl.max(tl.where(tiles == CHUNK // 64 - 1, next_one, 0))
        offset = start // TILE + tiles
        crossed = tl.where(offset * TILE < n, crossed, 0)
        place = found + tl.cumsum(crossed, 0) - 1
        tl.store(offsets + place, offset, mask=(crossed != 0) & (place < width))
        found += tl.sum(crossed)
    for start in range(0, width, CHUNK):
        at = start + tl.arange(0, CHUNK)
        tl.store(offsets + at, tl.zeros_like(at) + PAD, mask=(at >= found) & (at < width))


@triton.jit(do_not_specialize=["heads", "rows", "n", "width"])
def best_places_kernel(
    scores, sizes, places, ends, counts, heads, rows, n, width,
    FORCED: tl.constexpr, ENDS: tl.constexpr, COUNTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The places of the best entries of one row, ascending; of two that are equal the smaller place is the better.

    scores (B * heads * rows, n) fp32; sizes (heads) int64; places (B * heads * rows, width) int32, padded with PAD. The
    first FORCED are taken before all others. ends, counts (B) int32 if ENDS, if COUNTS: of a sequence's rows only the
    entries before its end are there, and no more than its count are taken.
    """
    row = tl.program_id(0).to(tl.int64)
    sequence = row // rows // heads
    size = tl.minimum(tl.load(sizes + row // rows % heads).to(tl.int32), width)
    if COUNTS:
        size = tl.minimum(size, tl.maximum(tl.load(counts + sequence), 0))
    end = n
    if ENDS:
        end = tl.minimum(tl.load(ends + sequence), n)
    _places(scores + row * n, 0, FORCED, end, size, places + row * width, width, CHUNK)


@triton.jit
def _copy(found, to, width, CHUNK: tl.constexpr):
    """Takes over the entries of a head."""
    for start in range(0, width, CHUNK):
        at = start + tl.arange(0, CHUNK)
        tl.store(to + at, tl.load(found + at, mask=at < width), mask=at < width)


@triton.jit(
    do_not_specialize=[
        "heads", "lines", "others", "k_len", "seen", "columns_width", "diagonals_width",
        "listing", "rows", "all_rows", "n", "first", "row0", "reach", "tile0", "elements",
    ]
)  # fmt: skip
def choose_kernel(
    vertical, near, far, line_heads, columns, diagonals, other_heads, other_columns, other_diagonals,
    scores, list_heads, offsets, tiles,
    heads, lines, others, k_len, seen, columns_width, diagonals_width,
    listing, rows, all_rows, n, first, row0, reach, tile0, elements,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes what a layer chooses: one program for a head's columns, for its diagonals, or for one row's tiles.

    Heads that choose neither columns nor diagonals have a program each that takes theirs over.

    line_heads (lines, 3) int32: head, columns and diagonals in tokens. vertical (B, lines, K) and near, far (B, lines,
    seen) fp32: masses by key, and by distance, the sum of both; columns (B, heads, columns_width) and diagonals
    (B, heads, diagonals_width) int32, of which each head's are written. other_heads (others) int32: heads whose entries
    are those of other_columns and other_diagonals, which have the same shapes.
    list_heads (listing, 2) int32: head and tiles beside the own one. scores (B, listing, rows, n) fp32: of the tiles
    from tile0 on, for row row0 + i; offsets (B, heads, all_rows + 1) int64 and tiles (T) int32 as in a SparseIndex. A
    row's own tile is at first + row, and it sees `reach` tiles before it.
    elements: B, the elements of the batch.
    """
    pid = tl.program_id(0)
    if pid < 2 * elements * lines:
        line = (pid % (elements * lines)).to(tl.int64)
        entry = line_heads + line % lines * 3
        head = line // lines * heads + tl.load(entry)
        if pid < elements * lines:
            size = tl.minimum(tl.load(entry + 1), k_len)
            to = columns + head * columns_width
            _places(vertical + line * k_len, 0, TILE, k_len, size, to, columns_width, CHUNK)
        else:
            at = line * seen
            to = diagonals + head * diagonals_width
            _offsets(near + at, far + at, tl.minimum(k_len, seen), tl.load(entry + 2), to, diagonals_width, CHUNK)
    elif pid < elements * (2 * lines + others):
        at = (pid - 2 * elements * lines).to(tl.int64)
        head = at // others * heads + tl.load(other_heads + at % others)
        _copy(other_columns + head * columns_width, columns + head * columns_width, columns_width, CHUNK)
        to = diagonals + head * diagonals_width
        _copy(other_diagonals + head * diagonals_width, to, diagonals_width, CHUNK)
    else:
        at = (pid - elements * (2 * lines + others)).to(tl.int64)
        row = (at % rows).to(tl.int32)
        entry = list_heads + at // rows % listing * 2
        head = at // rows // listing * heads + tl.load(entry)
        place = offsets + head * (all_rows + 1) + row0 + row
        begin = tl.load(place)
        width = (tl.load(place + 1) - begin).to(tl.int32)
        own = first + row0 + row
        low = tl.maximum(own - reach, 0)
        # The first tile comes before all others.
        forced = tl.where(low == 0, 1, low)
        wanted = tl.minimum(tl.load(entry + 1), width)
        _places(scores + (at * n - tile0), low, forced, own, wanted, tiles + begin, width, CHUNK)
