"""Device code of top-k; kernels.patterns.triton launches it. Imports triton.

Shapes: B batch, H query heads, h heads of one kind, R query tiles, N key tiles, K key length.

A row of scores is a tuple (scores, more, seen, factor, top, total), of which only what its sort
needs is read. PLAIN: scores. SUM: scores + more at the first `seen` places, 0 at others. SOFTMAX:
exp2((scores - top) * factor) / total where `factor` is positive, else scores.
"""

from __future__ import annotations

import triton
import triton.language as tl

PAD = tl.constexpr(2**31 - 1)
PLAIN = tl.constexpr(0)
SUM = tl.constexpr(1)
SOFTMAX = tl.constexpr(2)
# Mass is added up in whole numbers, as in kernels.topk.
_UNITS = tl.constexpr(2.0**40)


@triton.jit
def _scores(row, at, n, SORT: tl.constexpr):
    """Scores of some places; -inf for NaN and from n on."""
    scores, more, seen, factor, top, total = row
    if SORT == SUM:
        there = (at < n) & (at < seen)
        score = tl.load(scores + at, mask=there, other=0.0)
        score += tl.load(more + at, mask=there, other=0.0)
    else:
        score = tl.load(scores + at, mask=at < n, other=float("-inf"))
    if SORT == SOFTMAX:  # noqa: SIM102 (known at compile time; the next is not)
        if factor > 0:
            score = tl.exp2((score - top) * factor) / total
    return tl.where((score == score) & (at < n), score, float("-inf"))


@triton.jit
def _ordered(scores):
    """Unsigned integers that compare as the scores do: bits of negative ones run backwards."""
    bits = scores.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def units_of(scores):
    """The masses of scores; none below 0."""
    return (tl.maximum(scores, 0.0) * _UNITS).to(tl.int64)


@triton.jit
def _worst(row, first, n, wanted, CHUNK: tl.constexpr, SORT: tl.constexpr):
    """The worst of the best `wanted` scores of first ... n, _ordered, and its equals among them.

    A radix select: a histogram of eight bits at a time, from the highest, yields the digit.
    """
    bins = tl.arange(0, 256)
    worst = tl.full([], 0, tl.uint32)
    for level in tl.static_range(4):
        counts = tl.zeros([256], tl.int32)
        for start in range(first, n, CHUNK):
            score = _scores(row, start + tl.arange(0, CHUNK), n, SORT)
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
def _mass_above(row, first, n, bound, CHUNK: tl.constexpr, SORT: tl.constexpr):
    """The mass of the scores of first ... n that are better than `bound`, _ordered."""
    mass = tl.full([], 0, tl.int64)
    for start in range(first, n, CHUNK):
        score = _scores(row, start + tl.arange(0, CHUNK), n, SORT)
        mass += tl.sum(tl.where(_ordered(score) > bound, units_of(score), 0))
    return mass


@triton.jit
def _worst_by_mass(row, first, n, held, wanted, CHUNK: tl.constexpr, SORT: tl.constexpr):
    """As _worst, of the fewest best scores that, with the mass `held`, hold the mass `wanted`.

    Bit by bit: the sums of a digit's 256 masses would take the registers of 256 chunks.
    """
    worst = tl.full([], 0, tl.uint32)
    bit = tl.full([], 1 << 31, tl.uint32)
    for _ in range(32):
        mass = held + _mass_above(row, first, n, (worst | bit) - 1, CHUNK, SORT)
        worst = tl.where(mass.to(tl.float64) >= wanted, worst | bit, worst)
        bit = bit >> 1
    above = held + _mass_above(row, first, n, worst, CHUNK, SORT)
    # Only positive scores have mass.
    bits = tl.maximum((worst ^ 0x80000000).to(tl.int32, bitcast=True), 0)
    unit = tl.maximum(units_of(bits.to(tl.float32, bitcast=True)), 1)
    ties = ((wanted - above.to(tl.float64)) / unit.to(tl.float64)).to(tl.int64)
    ties += ((above + ties * unit).to(tl.float64) < wanted).to(tl.int64)
    return worst, tl.minimum(tl.maximum(ties, 0), n).to(tl.int32)


@triton.jit
def search(
    row, first, forced, n, size, share, own, CHUNK: tl.constexpr, SORT: tl.constexpr,
    COVERAGE: tl.constexpr,
):  # fmt: skip
    """The worst score that is taken, how many ties with it are, and what all others must exceed.

    Places first ... forced are taken before all others. A positive `share`, if COVERAGE: no more
    are taken than hold this fraction of the mass; `own` has mass, and is taken, too.
    """
    held = 0
    own += tl.full([], 0.0, tl.float32)
    mass = units_of(own)
    for start in range(first, tl.minimum(forced, n), CHUNK):
        score = _scores(row, start + tl.arange(0, CHUNK), tl.minimum(forced, n), SORT)
        held += tl.sum((score > float("-inf")).to(tl.int32))
        if COVERAGE:
            mass += tl.sum(units_of(score))
    begin = tl.maximum(first, forced)
    worst, ties = _worst(row, begin, n, tl.maximum(size - held, 0), CHUNK, SORT)
    floor = float("-inf")
    if COVERAGE:  # noqa: SIM102 (known at compile time; the next is not)
        if share > 0:
            floor = 0.0
            total = own.to(tl.float64)
            for start in range(first, n, CHUNK):
                score = _scores(row, start + tl.arange(0, CHUNK), n, SORT)
                total += tl.sum(tl.maximum(score, 0.0).to(tl.float64))
            least, places = _worst_by_mass(row, begin, n, mass, total * share * _UNITS, CHUNK, SORT)
            ties = tl.where(
                least > worst, places, tl.where(least == worst, tl.minimum(ties, places), ties)
            )
            worst = tl.maximum(least, worst)
    return worst, ties, floor


@triton.jit
def taken(row, at, n, forced, worst, ties, floor, SORT: tl.constexpr):
    """Mask of the places that are taken, and the number of those that equal the worst.

    Args:
        row: the scores; see `_scores`.
        at: the places.
        n: number of scores.
        forced: places before this one are taken before all others.
        worst: from `search`.
        ties: from `search`, less those taken so far.
        floor: from `search`.
        SORT: how `row` is read; see `_scores`.
    """
    score = _scores(row, at, n, SORT)
    order = _ordered(score)
    there = score > float("-inf")
    equal = (there & (at >= forced) & (order == worst)).to(tl.int32)
    best = (order > worst) | ((equal != 0) & (tl.cumsum(equal, 0) <= ties))
    return there & ((at < forced) | (best & (score > floor))), tl.sum(equal)


@triton.jit
def pad_from(to, count, width, CHUNK: tl.constexpr):
    """PAD in places count ... width."""
    for start in range(0, width, CHUNK):
        at = start + tl.arange(0, CHUNK)
        tl.store(to + at, tl.zeros_like(at) + PAD, mask=(at >= count) & (at < width))


@triton.jit
def places_of(
    row, first, forced, n, size, share, own, to, width, CHUNK: tl.constexpr, SORT: tl.constexpr,
    COVERAGE: tl.constexpr,
):  # fmt: skip
    """Writes the places among first ... n that are taken, ascending, padded to `width`."""
    worst, ties, floor = search(row, first, forced, n, size, share, own, CHUNK, SORT, COVERAGE)
    count = 0
    for start in range(first, n, CHUNK):
        at = start + tl.arange(0, CHUNK)
        mask, equal = taken(row, at, n, forced, worst, ties, floor, SORT)
        place = count + tl.cumsum(mask.to(tl.int32), 0) - 1
        tl.store(to + place, at, mask=mask & (place < size))
        ties -= equal
        count = tl.minimum(count + tl.sum(mask.to(tl.int32)), size)
    pad_from(to, count, width, CHUNK)


@triton.jit(do_not_specialize=["n", "width"])
def top_k_kernel(
    scores, places, ends, counts, n, width,
    ENDS: tl.constexpr, COUNTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Places of the best entries of a row, ascending; of equals the smaller place is better.

    scores (B, n) fp32; places (B, width) int32, padded with PAD. ends, counts (B) int32 if ENDS, if
    COUNTS: of a row only the entries before its end are read, and no more than its count are taken.
    """
    row = tl.program_id(0).to(tl.int64)
    size = width
    if COUNTS:
        size = tl.minimum(size, tl.maximum(tl.load(counts + row), 0))
    end = n
    if ENDS:
        end = tl.minimum(tl.load(ends + row), n)
    scores += row * n
    places_of(
        (scores, scores, n, 0.0, 0.0, 1.0), 0, 0, end, size, 0.0, 0.0, places + row * width,
        width, CHUNK, PLAIN, False,
    )  # fmt: skip
