"""Device code of top-k; kernels.patterns.triton launches it. Imports triton.

Shapes: B batch, H query heads, h heads of one kind, R query tiles, N key tiles, K key length.
"""

from __future__ import annotations

import triton
import triton.language as tl

PAD = tl.constexpr(2**31 - 1)


@triton.jit
def _scores(scores, at, n):
    """Scores of some places; -inf for NaN and from n on."""
    score = tl.load(scores + at, mask=at < n, other=float("-inf"))
    return tl.where(score == score, score, float("-inf"))


@triton.jit
def _ordered(scores):
    """Unsigned integers that compare as the scores do: bits of negative ones run backwards."""
    bits = scores.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _worst(scores, first, n, wanted, CHUNK: tl.constexpr):
    """The worst of the best `wanted` scores of first ... n, _ordered, and its equals among them.

    A radix select: a histogram of eight bits at a time, from the highest, yields the digit."""
    bins = tl.arange(0, 256)
    worst = tl.full([], 0, tl.uint32)
    for level in tl.static_range(4):
        counts = tl.zeros([256], tl.int32)
        for start in range(first, n, CHUNK):
            score = _scores(scores, start + tl.arange(0, CHUNK), n)
            order = _ordered(score)
            alike = score > float("-inf")
            if level > 0:
                alike = alike & ((order >> (32 - 8 * level)) == (worst >> (32 - 8 * level)))
            counts += tl.histogram(
                ((order >> (24 - 8 * level)) & 255).to(tl.int32), 256, mask=alike
            )
        if level == 0:
            wanted = tl.minimum(wanted, tl.sum(counts))
        digit = tl.sum((tl.cumsum(counts, 0, reverse=True) >= wanted).to(tl.int32)) - 1
        wanted -= tl.sum(tl.where(bins > digit, counts, 0))
        worst = worst | (digit.to(tl.uint32) << (24 - 8 * level))
    return worst, wanted


@triton.jit
def _taken(scores, at, n, forced, worst, room):
    """Mask of the places that are taken, and the number of those that equal the worst."""
    score = _scores(scores, at, n)
    order = _ordered(score)
    there = score > float("-inf")
    equal = (there & (at >= forced) & (order == worst)).to(tl.int32)
    best = (order > worst) | ((equal != 0) & (tl.cumsum(equal, 0) <= room))
    return there & ((at < forced) | best), tl.sum(equal)


@triton.jit
def _search(scores, forced, n, size, CHUNK: tl.constexpr):
    """The worst score and the room for its equals next to the first `forced` places."""
    held = 0
    for start in range(0, tl.minimum(forced, n), CHUNK):
        score = _scores(scores, start + tl.arange(0, CHUNK), tl.minimum(forced, n))
        held += tl.sum((score > float("-inf")).to(tl.int32))
    return _worst(scores, forced, n, tl.maximum(size - held, 0), CHUNK)


@triton.jit(do_not_specialize=["heads", "rows", "n", "width"])
def top_k_kernel(
    scores, sizes, places, ends, counts, heads, rows, n, width,
    FORCED: tl.constexpr, ENDS: tl.constexpr, COUNTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Places of the best entries of a row, ascending; of equals the smaller place is better.

    scores (B * heads * rows, n) fp32; sizes (heads) int64; places (B * heads * rows, width) int32,
    padded with PAD. The first FORCED are taken before all others. ends, counts (B) int32 if ENDS,
    if COUNTS: of a sequence's rows only the entries before its end are read, and no more than its
    count are taken."""
    row = tl.program_id(0).to(tl.int64)
    sequence = row // rows // heads
    size = tl.minimum(tl.load(sizes + row // rows % heads).to(tl.int32), width)
    if COUNTS:
        size = tl.minimum(size, tl.maximum(tl.load(counts + sequence), 0))
    end = n
    if ENDS:
        end = tl.minimum(tl.load(ends + sequence), n)
    scores += row * n
    places += row * width
    worst, room = _search(scores, FORCED, end, size, CHUNK)
    count = 0
    for start in range(0, end, CHUNK):
        at = start + tl.arange(0, CHUNK)
        taken, equal = _taken(scores, at, end, FORCED, worst, room)
        place = count + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(places + place, at, mask=taken & (place < size))
        room -= equal
        count = tl.minimum(count + tl.sum(taken.to(tl.int32)), size)
    for start in range(0, width, CHUNK):
        at = start + tl.arange(0, CHUNK)
        tl.store(places + at, tl.zeros_like(at) + PAD, mask=(at >= count) & (at < width))
